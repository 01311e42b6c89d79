"""Kernels, bytes and messages of each kind of part under a layout."""
