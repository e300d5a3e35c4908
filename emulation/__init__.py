"""Emulation of far memory on machines without it; what is real so far: nothing hidden."""
