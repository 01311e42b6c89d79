"""The simulator of plans: SimPy engine, metrics, memory timeline, report, command line."""
