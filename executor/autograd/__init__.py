"""A stage's forward and backward on one microbatch, with the input gradient apart from the weight gradient."""
