"""What is seen on the terminal beside a command's output: messages, progress, the live view."""
