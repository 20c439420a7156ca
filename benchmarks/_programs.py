"""What the programs of published runs do that the best plan of their strategy does not, as far as it is known."""

from dataclasses import dataclass
from typing import Any

from tapas.ir.graph import Tensor
from tapas.planner.solution import Group, Solution, Transfer
from tapas.problem.problem import WeightVariable
from tapas.sharding.layout import B, R, S, State

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Messages:
    """Of a layer in both passes, whole activations over the tensor-parallel axis, the forward pass done twice."""

    gathered: int
    scattered: int


@dataclass(frozen=True, slots=True)
class Program:
    eager: Messages | None = None  # as many as the best plan has
    compiled: Messages | None = None
    whole_loss: bool = False  # of all the vocabulary, on every rank of the tensor-parallel axis
    unfused_attention: bool = False  # scores are written down, all of them, and dropped out


# KempnerForge with tensor parallelism (kempnerforge/distributed/tensor_parallel.py at 01b461a): q, k, v, gate and up
# are ColwiseParallel with input_layouts=Shard(1) each, so every one gathers the same activation, and scatters a
# gradient. Its own profile of an eager run (benchmarks/profiling/13b_24gpu_profiling.md: 40 layers, 20 passes) has
# 9,679 gathers and 6,420 scatters of activations, 12 and 8 a layer. torch.compile merges the gathers of one tensor, but
# not the scatters of its gradients: 2 gathers and 2 scatters forward, 2 and 5 backward, counted in the graphs of such a
# layer (torch 2.13, a process group that sends nothing); the forward pass done again adds 2 and, as the profile has it,
# 1. Logits are gathered, and the loss is computed by all.
KEMPNER = Program(Messages(12, 8), Messages(6, 8), whole_loss=True)
# Megatron-LM at 6985e58 (examples/academic_paper_scripts/sc21): products around a fused softmax, and dropout.
MEGATRON_2021 = Program(unfused_attention=True)


def program_of(row: Row) -> Program:
    if "Kempner" in row["source"] and row["tp"] > 1:
        return KEMPNER
    return MEGATRON_2021 if "sc21" in row["source"] else Program()


def of_weight(found: Solution, group: Group, transfer: Transfer) -> bool:
    variables, source = found.part(group).variables, transfer.edge.source
    return source < len(variables) and isinstance(variables[source], WeightVariable)


def more_seconds(found: Solution, row: Row, messages: Messages) -> float:
    """What the messages of all layers take, over what those of the plan do."""
    planned = sum(
        len(group.copies) * transfer.seconds
        for group in found.groups()
        if found.problem.copies[group.block] == row["arch"]["layers"]
        for transfer in found.transfers(group)
        if not of_weight(found, group, transfer)
    )
    stream = Tensor("stream", (round(row["batch_per_pass"]), row["seq"], row["arch"]["hidden"]), "bfloat16", True)
    outer: list[State] = [S(0) if size > 1 else R for size in found.problem.router.mesh.sizes[:-1]]
    space = found.problem.router.space(stream, (S(0), S(1)))
    one = space.step(space.find((*outer, S(1))), space.find((*outer, B)))
    a_layer = messages.gathered * one.forward_seconds + messages.scattered * one.backward_seconds
    return row["arch"]["layers"] * a_layer - planned
