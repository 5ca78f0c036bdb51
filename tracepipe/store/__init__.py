"""A recording as tables: it is read once, and asked many times."""
