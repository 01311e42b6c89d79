"""Checkpoints by global parameter name: saved under one plan, loaded under any other of the same model and batch.

Files are laid out and read by the safetensors library; what is ours on top of it, and why, says docs/CHECKPOINTS.md.
"""
