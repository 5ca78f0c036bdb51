"""What the terminal shows besides a command's output: messages, progress, the live view."""
