"""The page of a recording: reports, findings and figures as one HTML file."""
