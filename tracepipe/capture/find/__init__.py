"""From hooks to places on this machine: libraries, functions, tracepoints, symbols of the kernel."""
