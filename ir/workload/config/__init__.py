"""Hugging Face configs and presets, read strictly into one vocabulary."""
