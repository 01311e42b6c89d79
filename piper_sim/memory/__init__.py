"""Bytes over time: a plan's buffers in dispatch order, and the executor's own storages."""
