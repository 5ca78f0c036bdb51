"""Marks in kernels: the header for CUDA C++, and a module for Triton. The GPU engine `warps` records them."""
