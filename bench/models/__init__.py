"""Models that the benches take keys and queries from: how they are trained, their weights, and
random ones."""
