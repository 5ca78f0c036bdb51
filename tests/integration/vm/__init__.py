"""A virtual machine with a kernel that has kprobes and a module named `nvidia`: `image` builds it, `machine` boots it."""
