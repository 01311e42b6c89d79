"""Token sources: synthetic or from a file, the same under every plan."""
