"""What was measured on one machine: curves, op classes, slowdown pairs, and their file."""
