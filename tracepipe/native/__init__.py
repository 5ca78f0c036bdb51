"""The inner loops in C, called through ctypes; each computes what the Python module of its name computes."""
