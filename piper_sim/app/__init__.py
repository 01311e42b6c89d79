"""The command line: flags to library calls, errors to exit codes. The only room that sees the executor."""
