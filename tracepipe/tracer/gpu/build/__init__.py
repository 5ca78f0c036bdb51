"""Builds the native libraries on the user's machine with its compilers, CUDA headers and driver."""
