"""Our BPF program, and the kernel's interfaces to load, attach and read it."""
