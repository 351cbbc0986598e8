"""Triton kernels, one file per op; imported only when a tensor needs them."""
