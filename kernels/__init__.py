"""Kernels for GPUs (Triton) with torch references beside them; issue by issue, none yet."""
