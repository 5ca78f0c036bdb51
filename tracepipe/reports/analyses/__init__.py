"""What reports reckon with: tables of numbers from frames."""
