"""Adapters connect serving engines to a pool; each module imports the engine that it is for."""
