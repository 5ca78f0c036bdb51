"""A part of a recording: what happened in a stretch of its time, and what that depends on."""
