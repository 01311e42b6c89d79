"""A user's module divided over ranks: its linears (tp), its tokens (cp)."""
