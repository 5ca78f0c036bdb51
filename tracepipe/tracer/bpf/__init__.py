"""The BPF programs, and the kernel's interfaces to load, attach and read them."""
