"""Perfetto's SQL on a trace: its own trace processor, as a program or as WebAssembly in this process."""
