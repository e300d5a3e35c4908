"""Emulation of far memory on machines that have none. Nothing is emulated yet."""
