"""Replays traces of requests: against simulated caches, or against tiers of real bytes."""
