"""One rank at work: the interpreter of its program, the kernels behind its ops, the worker process."""
