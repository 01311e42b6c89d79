"""Scheduling compute and communication jointly: published figures beside ours, one command each."""
