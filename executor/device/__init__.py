"""What computes: a CPU or a CUDA device with its streams, its clock, its memory, and what a rank is doing now."""
