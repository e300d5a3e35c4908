"""Microbenchmarks: each case shows ratios against bare memory operations or torch, in one run."""
