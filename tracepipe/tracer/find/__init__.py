"""Finds the places of hooks on this machine: libraries, functions, tracepoints, symbols of the kernel."""
