"""Seconds and bytes: of operators, moves, optimizers and memory over the step."""
