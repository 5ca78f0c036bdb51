"""A machine with kprobes and a module named `nvidia`: `image` builds it, `machine` boots it."""
