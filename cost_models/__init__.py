"""Work to seconds and bytes: hardware files, compute, links, collectives, memory. No SimPy, no torch."""
