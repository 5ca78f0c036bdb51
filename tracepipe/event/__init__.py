"""Events: their classes, JSON Schema and checks, and how they nest. This package imports no stage."""
