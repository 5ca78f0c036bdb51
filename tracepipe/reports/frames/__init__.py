"""A recording as frames: what every analysis reads."""
