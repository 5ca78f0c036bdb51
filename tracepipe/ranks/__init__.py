"""Reports across the ranks of a dataset, written once in SQL: DuckDB or Spark evaluates it."""
