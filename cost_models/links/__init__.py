"""Messages to seconds over a two-level fabric, and how much of its links each takes."""
