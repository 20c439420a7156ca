"""The folded model as nodes and edges: blocks, the operators in them, and what moves between these."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tapas.plan.assignment import BlockDecision, OperatorDecision
from tapas.plan.fingerprint import BlockStructure
from tapas.plan.plan import Move, Operator, Plan, PlanBlock
from tapas.report.plan import block_label
from tapas.report.traffic import label
from tapas.report.wiring import stored_call, structure_of_copy
from tapas.report.words import kind, steps, work, work_parts
from tapas.rules.base import wording
from tapas.sharding.layout import Layout, local_shape


def operators_by_block(plan: Plan) -> list[tuple[Operator, ...]]:
    """The operators of each block, as they come in the plan."""
    found, start = [], 0
    for block in plan.blocks:
        found.append(plan.operators[start : start + block.operators])
        start += block.operators
    return found


def drawable(plan: Plan) -> bool:
    """Whether a plan says enough: one of an older format does not, nor one that was changed by hand."""
    for block, operators in zip(plan.blocks, operators_by_block(plan), strict=True):
        if not block.numbers:
            return False
        calls = structure_of_copy(plan, block.numbers[0]).operators
        decided = plan.assignment.decision(block.numbers[0]).operators
        shaped = all(
            len(op.operands) == len(d.operands) and len(op.results) == len(d.results)
            for op, d in zip(operators, decided, strict=False)
        )
        if [op.target for op in operators] != [stored_call(call).target for call in calls] or not shaped:
            return False
    return True


def split_names(plan: Plan) -> list[str]:
    """How work is split, in words, the way that takes most time first: each gets a colour."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for op in plan.operators:
        seconds[split_name(plan, op)] += op.copies * op.seconds
    return sorted(seconds, key=lambda name: -seconds[name])


def split_name(plan: Plan, op: Operator) -> str:
    return work(op, plan.mesh["names"]).replace("\n", ", ")


def blocks_data(plan: Plan) -> list[dict[str, Any]]:
    return [
        _BlockPicture(plan, block, operators).data()
        for block, operators in zip(plan.blocks, operators_by_block(plan), strict=True)
    ]


def links_data(plan: Plan) -> list[dict[str, int]]:
    """What blocks read of each other; how often, over all copies."""
    home = {number: b for b, block in enumerate(plan.blocks) for number in block.numbers}
    times: Counter[tuple[int, int]] = Counter()
    for number, copy in enumerate(plan.assignment.structure.copies):
        for source, _ in copy.ports:
            if source in home and number in home:
                times[home[source], home[number]] += 1
    return [{"from": a, "to": b, "times": n} for (a, b), n in times.items()]


def _part(axis: str, choice: str, words: str) -> dict[str, str]:
    """What one axis does to an operator; `factor` as in its pattern, "" where it is not split."""
    return {"axis": axis, "factor": choice.partition("|")[0] if words else "", "does": words}


def move_data(move: Move, name: str) -> dict[str, Any]:
    return {
        "tensor": name, "forward": steps(move, "forward"), "backward": steps(move, "backward"),
        "nbytes": move.nbytes, "seconds": move.seconds, "hidden": move.hidden, "copies": move.copies,
        "before": list(move.before), "after": list(move.after), "again": move.again,
    }  # fmt: skip


class _BlockPicture:
    """One block, by its first copy."""

    def __init__(self, plan: Plan, block: PlanBlock, operators: Sequence[Operator]) -> None:
        self.plan, self.block, self.operators = plan, block, operators
        self.structure: BlockStructure = structure_of_copy(plan, block.numbers[0])
        self.decision: BlockDecision = plan.assignment.decision(block.numbers[0])
        mine = set(block.numbers)
        self.moves: dict[tuple[str, int], list[Move]] = defaultdict(list)
        for move in plan.moves:
            if move.copy in mine and (steps(move, "forward") or steps(move, "backward")):
                self.moves[move.source, move.reader].append(move)

    def data(self) -> dict[str, Any]:
        plan, block = self.plan, self.block
        weights = [{"name": self.short(text.rpartition(" ")[0]), "shape": text.rpartition(" ")[2].replace("x", " × ")}
                   for text in self.structure.weights]  # fmt: skip
        return {
            "name": block_label(plan, block.name), "copies": block.copies, "recompute": block.recompute,
            "compute": block.compute, "waited": block.communication, "hidden": block.hidden,
            "operators": [self.operator(i) for i in range(len(self.operators))], "weights": weights,
            "shared": {source: self.moved(source, -1) for source, reader in self.moves if reader == -1},
            "exports": list(self.structure.exports), "ports": self.structure.ports,
        }  # fmt: skip

    def short(self, name: str) -> str:
        """Without the name of the block, which is said once."""
        name = "" if name == self.block.name else name.removeprefix(f"{self.block.name}.")
        return name.removesuffix(".weight")

    def moved(self, source: str, reader: int) -> list[dict[str, Any]]:
        """The moves between two places, that of most copies first."""
        found = sorted(self.moves.get((source, reader), ()), key=lambda m: -m.copies)
        return [move_data(move, label(self.plan, move).removeprefix(f"{move.block}.")) for move in found]

    def operator(self, i: int) -> dict[str, Any]:
        op, decided = self.operators[i], self.decision.operators[i]
        parts = zip(self.plan.mesh["names"], op.choice, work_parts(op), strict=True)
        read = list(self.operands(i, stored_call(self.structure.operators[i]).operands, op, decided))
        return {
            "name": self.short(op.module), "kind": kind(op.target), "target": op.target,
            "split": split_name(self.plan, op), "axes": [_part(*part) for part in parts],
            "factors": op.factors, "seconds": op.seconds, "communication": op.communication, "operands": read,
            "results": [self.layout(s, d) for s, d in zip(op.results, decided.results, strict=True)],
            "missing": op.missing_rule, "weights": [self.short(w) for w in op.weights],
            "shown": bool(op.weights or op.communication or wording(op.target).listed or any(r["moves"] for r in read)),
        }  # fmt: skip

    def operands(
        self, i: int, references: Sequence[str], op: Operator, decided: OperatorDecision
    ) -> Iterator[dict[str, Any]]:
        for reference, shape, layout in zip(references, op.operands, decided.operands, strict=False):
            yield {"from": reference, "moves": self.moved(reference, i), **self.layout(shape, layout)}

    def layout(self, shape: Sequence[int], layout: Layout) -> dict[str, Any]:
        sizes = tuple(self.plan.mesh["sizes"])
        return {
            "shape": list(shape),
            "local": list(local_shape(shape, layout, sizes)),
            "layout": list(map(str, layout)),
        }
