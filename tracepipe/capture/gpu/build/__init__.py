"""Builds the native libraries on the user's machine: compilers, CUDA's parts, the driver."""
