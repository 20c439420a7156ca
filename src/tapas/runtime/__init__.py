"""One rank's program: a plan compiled to local operators and collectives, inside a module."""
