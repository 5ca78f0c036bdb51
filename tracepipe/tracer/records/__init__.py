"""Renders the records of probes as lines of an event file."""
