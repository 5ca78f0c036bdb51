"""Reports across the ranks of a dataset, written once as Ibis expressions: DuckDB or Spark evaluates them."""
