"""How tensors move between ranks: one protocol, several carriers (gloo, and virtual ranks in one process)."""
