"""A recording as columns and frames, which every analysis reads."""
