"""All ranks as threads of this process."""

from itertools import product

import torch

from tapas.ir.graph import Leaf
from tapas.runtime.collectives import Count
from tapas.runtime.placements import shard
from tapas.runtime.program import write_program
from tapas.runtime.rank import Rank
from tapas.runtime.threads import ThreadAxis, run_threads, thread_axes
from tapas.verify.job import Trial
from tapas.verify.steps import Outcome, loss_position, take_steps

Coord = tuple[int, ...]


def given_leaves(trial: Trial) -> list[Leaf]:
    """Those that the program takes; others it computes itself."""
    made = trial.made
    return [leaf for leaf in trial.graph.leaves if leaf.kind != "constant" or leaf.tensor not in made]


def local_leaves(trial: Trial, coord: Coord) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The program's arguments on one rank, and its parts of the parameters among them."""
    layouts, sizes = trial.stored, trial.mesh.sizes
    trained = set(trial.trained())
    arguments, parameters = [], {}
    for leaf in given_leaves(trial):
        value = trial.leaves[leaf.tensor]
        if leaf.tensor in layouts:
            value = shard(value, layouts[leaf.tensor], sizes, coord)
        value = value.clone()
        if leaf.tensor in trained:
            parameters[leaf.tensor] = value.requires_grad_()
        arguments.append(value)
    return arguments, parameters


def rank_at(trial: Trial, coord: Coord, wires: list[ThreadAxis]) -> Rank:
    return Rank(trial.mesh.sizes, coord, wires, Count(), torch.device("cpu"))


def run_in_threads(trial: Trial) -> dict[Coord, Outcome]:
    sizes = trial.mesh.sizes
    axes = thread_axes(sizes)

    def work(coord: Coord) -> Outcome:
        rank = rank_at(trial, coord, axes[coord])
        program = write_program(trial.graph, trial.folded, trial.assignment, rank)
        arguments, parameters = local_leaves(trial, coord)
        kinds = [leaf.kind for leaf in given_leaves(trial)]
        held = [value for kind, value in zip(kinds, arguments, strict=True) if kind != "input"]
        inputs = [value for kind, value in zip(kinds, arguments, strict=True) if kind == "input"]
        return take_steps(
            lambda: program(*arguments), parameters, loss_position(trial), trial.steps, rank.count, held, inputs
        )

    return run_threads(work, list(product(*map(range, sizes))), axes)
