"""A user's module to `model.json`: captured without values, measured unit by unit."""
