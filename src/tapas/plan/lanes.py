"""The lanes of a timeline, simulated or recorded: what a rank does at a time."""

COMPUTE = "compute"
HOST = "host"  # of a GPU: what the processor beside it does
MOVES, AHEAD, BEHIND = "moves of activations", "gathers ahead", "reductions behind"
LANES = (COMPUTE, HOST, MOVES, AHEAD, BEHIND)
