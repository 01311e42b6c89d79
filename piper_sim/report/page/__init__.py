"""A run as one HTML page to mail."""
