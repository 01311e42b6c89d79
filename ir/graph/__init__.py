"""The global training graph: nodes, how it is built, its classes of nodes, its gradient sync."""
