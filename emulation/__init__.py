"""Emulation: memory whose hosts' caches do not see each other; the true drivers in guests."""
