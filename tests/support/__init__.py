"""What the tests use to see a trace as Perfetto sees it: its own trace processor, its own UI."""
