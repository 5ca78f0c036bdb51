"""Opens recordings, reads them in a loop, converts them, and sums up what was found."""
