"""Computes tables of numbers from frames, for reports."""
