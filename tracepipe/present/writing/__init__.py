"""Writers of reports: text for a terminal, files of tables."""
