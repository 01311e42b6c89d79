"""Work of compute ops to seconds: kernels, optimizer, host launches, slowdowns by communication beside them."""
