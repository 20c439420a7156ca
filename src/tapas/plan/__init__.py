"""The result as data: what was decided, what it costs, as a file."""
