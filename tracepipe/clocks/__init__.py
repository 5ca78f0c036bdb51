"""Source times become trace times here, and nowhere else."""
