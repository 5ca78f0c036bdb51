"""The flight recorder: what came last, in memory, until it is asked for."""
