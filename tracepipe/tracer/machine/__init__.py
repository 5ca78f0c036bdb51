"""This machine: its facts, its processes, and the meaning of its refusals."""
