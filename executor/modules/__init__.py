"""Models the executor can run: reference modules built from the model graph's config, and users' annotated modules."""
