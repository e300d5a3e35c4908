"""The GPU path: mapping a pool, copies, the hot buffer, the decode step."""
