"""Records of the probes as lines of an event file."""
