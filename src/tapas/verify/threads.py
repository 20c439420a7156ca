"""All ranks as threads of this process: the same program without process groups."""

import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import fx

from tapas._torch import no_dispatch_modes
from tapas.ir.graph import Graph
from tapas.runtime.ahead import ForwardPass
from tapas.runtime.buckets import make_buckets
from tapas.runtime.collectives import Count, Done, Rank
from tapas.runtime.gradients import Accumulation, Gradients
from tapas.runtime.lent_memory import Memory
from tapas.runtime.output_gradients import returned
from tapas.runtime.parameters import stored_part
from tapas.runtime.parts import shard
from tapas.runtime.program import Left, write_program
from tapas.runtime.side_groups import SideAxes, SideStream
from tapas.verify.draws import with_same_draws
from tapas.verify.steps import Outcome, Stepper, take_steps
from tapas.verify.trial import Coord, Trial


class _Meeting:
    """Where the ranks along one axis exchange tensors. What is handed over is a copy: a rank that is ahead may have
    taken its optimizer's step before another one reads what it got."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.slots = size, threading.Barrier(size), [None] * size

    def exchange(self, index: int, item: Any) -> list[Any]:
        self.slots[index] = item
        self.barrier.wait(60)
        items = list(self.slots)
        self.barrier.wait(60)
        return items


def _copy(x: torch.Tensor) -> torch.Tensor:
    with no_dispatch_modes():  # processes need none: it is no memory of the program's
        return x.detach().clone()


class ThreadAxis:
    def __init__(self, meeting: _Meeting, index: int) -> None:
        self.meeting, self.size, self.index = meeting, meeting.size, index

    def all_reduce(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        stacked = torch.stack(self.meeting.exchange(self.index, _copy(x)))
        return stacked.sum(0).to(x.dtype) if how == "sum" else stacked.amax(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.index, _copy(x)))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.meeting.exchange(self.index, _copy(x))
        return torch.stack([p.chunk(self.size)[self.index] for p in parts]).sum(0).to(x.dtype)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        every = self.meeting.exchange(self.index, _copy(x).split(sent))
        return torch.cat([parts[self.index] for parts in every])

    def pass_on(self, parts: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Done:
        every = self.meeting.exchange(self.index, list(map(_copy, parts)))
        with no_dispatch_modes():
            for part, whole in zip(every[self.index - 1], arriving, strict=True):
                whole.copy_(part)
        return Done()


def thread_axes(mesh: Sequence[int]) -> dict[Coord, list[ThreadAxis]]:
    """For each coordinate of a mesh, its axes."""
    meetings: dict[tuple, _Meeting] = {}
    axes: dict[Coord, list[ThreadAxis]] = {}
    for coord in product(*map(range, mesh)):
        keys = [(a, *coord[:a], None, *coord[a + 1 :]) for a in range(len(mesh))]
        met = [meetings.setdefault(key, _Meeting(n)) for key, n in zip(keys, mesh, strict=True)]
        axes[coord] = list(map(ThreadAxis, met, coord))
    return axes


def run_threads(work: Callable[[Coord], Any], axes: dict[Coord, list[ThreadAxis]]) -> dict[Coord, Any]:
    """Run `work(coord)` for all coordinates at once; the first error ends all of them."""
    results: dict[Coord, Any] = {}
    errors: list[BaseException] = []

    def one(coord: Coord) -> None:
        try:
            results[coord] = work(coord)
        except BaseException as error:  # whatever it is, the others must not wait for this rank
            errors.append(error)
            for wires in axes.values():
                for axis in wires:
                    axis.meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(coord,)) for coord in axes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def local_leaves(trial: Trial, coord: Coord) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The program's arguments on one rank, and its parts of the parameters among them."""
    trained = set(trial.trained())
    arguments, parameters = [], {}
    for leaf in trial.graph.given_leaves:
        value = trial.leaves[leaf.tensor]
        if leaf.tensor in trial.placed.weights:
            value = shard(value, trial.placed.weights[leaf.tensor], trial.mesh.sizes, coord)
        value = value.clone()
        if leaf.tensor in trained:
            parameters[leaf.tensor] = value.requires_grad_()
        arguments.append(value)
    return arguments, parameters


def rank_at(trial: Trial, coord: Coord, wires: list[ThreadAxis]) -> Rank:
    return Rank(trial.mesh.sizes, coord, wires, Count(), torch.device("cpu"), side=SideAxes(wires))


def rank_program(trial: Trial, rank: Rank, left: Left | None = None) -> fx.GraphModule:
    program = write_program(trial.graph, trial.folded, trial.assignment, rank, left)
    return with_same_draws(program, trial, rank)


class Beside:
    """What a program leaves to its caller, for a rank that is a thread."""

    def __init__(self, trial: Trial, rank: Rank, left: Left, arguments: Sequence[torch.Tensor]) -> None:
        graph = trial.graph
        self.number = {leaf.tensor: i for i, leaf in enumerate(graph.given_leaves)}
        trained = {self.number[name] for name in trial.trained()}
        order = [self.number[name] for name in reversed(dict.fromkeys(left.used))]
        buckets = make_buckets(arguments, {self.number[name]: axes for name, axes in left.sums.items()}, order)
        units = [{self.number[weight.parameter]: weight.steps for weight in unit} for unit in left.units]
        self.left, self.side, self.stream, self.count = left, SideAxes(rank.wires), SideStream(rank.device), rank.count
        self.gradients = Gradients(
            arguments, trained, buckets, units, self.side, self.stream, rank.count, Memory(), Accumulation()
        )
        self.parameters = {self.number[leaf.tensor] for leaf in graph.given_leaves if leaf.kind == "parameter"}
        self.gathered = {index for unit in units for index in unit}

    def given(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        """The arguments of one call."""
        self.gradients.enter()
        leaves: list[Any] = [
            value if i not in self.parameters else None if i in self.gathered else self.gradients.leaf(i)
            for i, value in enumerate(arguments)
        ]
        return [*leaves, ForwardPass(
            self.left.units, lambda name: stored_part(arguments[self.number[name]]),
            lambda name, whole: self.gradients.leaf(self.number[name], whole), self.side, self.stream, self.count,
        )]  # fmt: skip

    def returned(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [returned(x, self.gradients.begin) for x in outputs]


def written(graph: Graph, outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What buffers are after a call, by tensor name."""
    values = outputs[len(graph.returned) :]
    return {buffer: value.detach() for (buffer, _), value in zip(graph.writes, values, strict=True)}


def run_in_threads(trial: Trial) -> dict[Coord, Outcome]:
    graph, axes = trial.graph, thread_axes(trial.mesh.sizes)
    kinds = [leaf.kind for leaf in graph.given_leaves]
    places = {leaf.tensor: i for i, leaf in enumerate(graph.given_leaves)}

    def work(coord: Coord) -> Outcome:
        rank = rank_at(trial, coord, axes[coord])
        left = Left()
        program = rank_program(trial, rank, left)
        arguments, parameters = local_leaves(trial, coord)
        beside = Beside(trial, rank, left, arguments)
        cuts = {places[name]: cut for name, cut in left.cuts.items()}
        held = [value for kind, value in zip(kinds, arguments, strict=True) if kind != "input"]
        inputs = [value for kind, value in zip(kinds, arguments, strict=True) if kind == "input"]

        def forward() -> Sequence[torch.Tensor]:
            given = beside.given(arguments)
            for i, cut in cuts.items():
                given[i] = cut(given[i])
            outputs = beside.returned(program(*given))
            for buffer, value in written(graph, outputs).items():
                arguments[places[buffer]] = value
            return outputs

        def buffers() -> dict[str, torch.Tensor]:
            return {buffer: arguments[places[buffer]] for buffer, _ in graph.writes}

        share = trial.placed.share(coord)
        return take_steps(Stepper(graph, forward, parameters, buffers, share, rank.count, held, inputs), trial.steps)

    return run_threads(work, axes)
