"""Model graphs at layer level, from a Hugging Face config, without torch."""
