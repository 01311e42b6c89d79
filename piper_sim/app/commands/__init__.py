"""The commands: each reads flags, calls the library, prints a table or one JSON object."""
