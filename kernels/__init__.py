"""Kernels for GPUs: Triton, with a torch reference beside each. None is built yet."""
