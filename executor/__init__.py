"""The executor of plans on torch.distributed. The only folder that imports torch."""
