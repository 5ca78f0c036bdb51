"""Mutated recordings through every reader, converter, report and command."""
