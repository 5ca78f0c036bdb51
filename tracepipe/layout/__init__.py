"""Decides tracks, names, nesting and flows. The entry is `draw.Layout`; `options` has what a user may
choose.
"""
