"""What an event is: its classes, its JSON Schema and its checks. Imports nothing above."""
