"""The terminal beside a command's output: messages, progress, the live view."""
