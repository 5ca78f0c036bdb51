"""What an event is: its classes, its JSON Schema and its checks. This package imports no stage."""
