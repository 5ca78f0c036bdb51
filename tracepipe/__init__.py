"""tracepipe: one timeline from the CUDA call to the warp."""

__version__ = "0.1.0"
