"""The library: what `import tracepipe` offers. The commands call the same functions."""
