"""Drawing of results: tables, pages and pictures."""
