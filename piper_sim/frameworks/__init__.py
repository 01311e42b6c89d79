"""Launches of training frameworks: read into jobs, and jobs written as launches. One table says both ways.

Nothing that is read is executed: scripts are split into words, YAML goes through the safe loader.
"""
