"""A recording: how it is opened, read in a loop, converted, and summed up."""
