"""What reports become: text for a terminal, pages, files of tables."""
