"""Ranks without a common parent: what each sees of the others, who is at fault, and who says so."""
