"""Triton kernels. Nothing here is imported until a tensor needs it: see backend.py."""
