"""Libraries that tell what the target's GPUs do, and this side of their channels."""
