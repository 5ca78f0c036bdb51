"""Reads the JSON Lines that layered bpftrace and BCC CUDA tracers print."""
