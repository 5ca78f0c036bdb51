"""Parts of recordings: the events in a window of time, and the earlier events on which they depend."""
