"""Doors for engines; each module here needs its engine installed and is imported on its own."""
