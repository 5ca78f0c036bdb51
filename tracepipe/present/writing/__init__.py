"""What reports become: text for a terminal, files of tables."""
