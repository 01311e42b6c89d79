"""Op classes and messages timed on a machine's own ranks; what units allocate, taken under FakeTensor."""
