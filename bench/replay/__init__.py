"""Replays traces of requests against simulated caches."""
