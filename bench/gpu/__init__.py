"""Measures the GPU path: builds, tests and times it in one call, and shows what was found."""
