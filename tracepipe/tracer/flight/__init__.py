"""The flight recorder keeps the last events in memory, and writes them on request."""
