"""Hooks: their sets, their signatures, and how a call's arguments are laid out."""
