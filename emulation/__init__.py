"""Emulation: incoherent memory, links of devices, faults; the true drivers in guests."""
