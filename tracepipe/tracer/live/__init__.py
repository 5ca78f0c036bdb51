"""Totals of a running capture, for the live view."""
