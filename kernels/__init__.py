"""Kernels for GPUs: Triton, with a torch reference beside each (`reference_*.py`).

They take tensors and tables of addresses, never a pool. On CPU tensors the reference runs, unless
TRITON_INTERPRET=1 was set before the import: then Triton's interpreter runs the kernels themselves.
"""
