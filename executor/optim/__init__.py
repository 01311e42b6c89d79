"""Gradient sums, flat buckets, the optimizer, and what keeps copies and shards in step."""
