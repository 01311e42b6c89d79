"""`piper-sim doctor`: the first hour on a machine as one command."""
