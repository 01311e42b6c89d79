"""Models the executor can run: reference modules built from the model graph's own config, and users' annotated modules."""
