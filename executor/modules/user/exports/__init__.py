"""The graph that torch.export takes of a user's module: how it is taken and watched, shared, and what it writes."""
