"""Per-program plans: columns, op names, text, and who runs what."""
