"""What happened: trace rows, their text, and durations taken from them."""
