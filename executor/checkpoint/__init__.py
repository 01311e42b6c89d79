"""Checkpoints by global parameter name: saved under one plan, loaded under any other of the same model and batch."""
