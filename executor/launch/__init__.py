"""Starting ranks, watching them, and telling who failed: on this machine, or under torchrun."""
