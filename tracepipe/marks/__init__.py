"""Marks in kernels: the header for CUDA C++, and the same for Triton. The GPU engine `warps` records them."""
