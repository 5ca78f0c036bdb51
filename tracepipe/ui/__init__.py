"""Shows traces in the Perfetto UI."""
