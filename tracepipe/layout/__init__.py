"""Decides tracks, names, nesting and flows. `draw.Layout` does; what a user may choose is in `options`."""
