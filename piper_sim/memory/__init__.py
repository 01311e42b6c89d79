"""A plan's bytes over time: what its ops allocate, the levels that makes, what an allocator reserves for it."""
