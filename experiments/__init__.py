"""One file per question; each reproduces a figure, a table or a validation."""
