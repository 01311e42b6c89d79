"""A user's own module: its annotations, and the cut at these seams."""
