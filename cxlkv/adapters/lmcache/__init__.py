"""LMCache: its chunks live in a pool, and are read and written where they lie; a storage plugin."""
