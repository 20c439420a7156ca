"""What the page shows of one plan: texts and figures for the templates, and data for the scripts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tapas.plan.plan import Plan, PlanBlock
from tapas.plan.simulate import SimulatedStep, simulate
from tapas.planner.explain import Alternative, ExplainedOperator, WhatIf
from tapas.planner.frontier import Frontier
from tapas.planner.mesh_ranking import RankedMesh
from tapas.report import units
from tapas.report.html.command import command
from tapas.report.html.graph import blocks_data, drawable, links_data, operators_by_block, split_names
from tapas.report.html.slices import weights_data
from tapas.report.html.streams import streams_data
from tapas.report.plan import RECOMPUTED, STRATEGIES, allowed, block_label, kind_of_memory, room, throughput
from tapas.report.traffic import TrafficRow, label, longest, sent
from tapas.report.weights import WeightRow, rows_of
from tapas.report.words import kind, mesh_text, steps


@dataclass(frozen=True, slots=True)
class Findings:
    """What is known besides the plan itself."""

    meshes: Sequence[RankedMesh] = ()
    curve: Frontier | None = None
    what_if: WhatIf | None = None


NOTHING_ELSE = Findings()


@dataclass(frozen=True, slots=True)
class View:
    """One plan of a page; `letter` tells two of them apart."""

    plan: Plan
    findings: Findings = NOTHING_ELSE
    letter: str = "a"
    name: str = ""  # of its file

    # ------------------------------------------------------------------------------------------ headline

    @property
    def devices(self) -> int:
        return prod(self.plan.mesh["sizes"])

    @property
    def mesh(self) -> str:
        return mesh_text(self.plan)

    @property
    def inputs(self) -> str:
        return ", ".join(f"{name} {units.shape(shape)}" for name, shape in self.plan.inputs.items())

    @property
    def settings(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.plan.source.get("settings", {}).items())

    @property
    def throughput(self) -> str:
        return throughput(self.plan)

    @property
    def optimal(self) -> bool:
        return self.plan.proof == "optimal"

    @property
    def gap(self) -> float:
        return self.plan.gap / self.plan.cost if self.plan.cost else 0.0

    @property
    def among(self) -> str:
        """Which plans the proof speaks of."""
        pinned = " among those that your pins and restrictions leave" if self.plan.pins else ""
        return pinned + (f" within {units.nbytes(self.plan.limit)} per device" if self.plan.limit else "")

    @property
    def used(self) -> int:
        return sum(self.plan.memory.values())

    @property
    def allowed(self) -> float:
        return allowed(self.plan)

    @property
    def room(self) -> str:
        return room(self.plan)

    @property
    def fits(self) -> bool:
        return self.used <= self.allowed

    @property
    def command(self) -> str:
        return command(self.plan)

    @property
    def from_python(self) -> bool:
        return "model" not in self.plan.source

    # ---------------------------------------------------------------------------------- five short answers

    @property
    def longest_block(self) -> "BlockTime | None":
        return max(self.blocks, key=lambda b: b.total, default=None)

    @property
    def sent(self) -> tuple[list[TrafficRow], list[TrafficRow]]:
        """The longest, and the rest."""
        return longest(self.plan)

    @property
    def sent_nbytes(self) -> int:
        return sum(row.sent_nbytes for row in sent(self.plan))

    @property
    def sent_most(self) -> TrafficRow | None:
        """What most bytes are sent of, in all copies."""
        return max(sent(self.plan), key=lambda row: row.sent_nbytes, default=None)

    @property
    def sent_alike(self) -> list[str]:
        """What as many bytes are sent of."""
        most = self.sent_most
        rows = [row for row in sent(self.plan) if most and row != most and row.sent_nbytes == most.sent_nbytes > 0]
        return [row.what.removeprefix(f"{row.block}.") for row in rows]

    @property
    def held_up(self) -> float:
        """The part of what could hide that is waited for all the same."""
        return 1.0 - self.plan.cluster.get("overlap", 1.0) if self.plan.seconds.get("hidden") else 0.0

    @property
    def best_known(self) -> "StrategyRow | None":
        """The fastest of the known strategies that fits."""
        fitting = [row for row in self.strategies if row.cost is not None and row.fits and row.name != THIS]
        return min(fitting, key=lambda row: row.cost or 0.0, default=None)

    @property
    def main_weight(self) -> WeightRow | None:
        """A row that speaks for the plan: `q_proj` where there is one, else that of the largest matrix."""
        rows = [row for row in self.weights if row.shape and row.shape != "scalar"]
        query = next((row for row in rows if row.name.endswith("q_proj.weight")), None)
        largest = max(rows, key=lambda row: prod(self.plan.shapes.get(row.name, [0])), default=None)
        return query or largest

    @property
    def main_sent(self) -> str:
        """What is sent of the main weight, said as a sentence goes on."""
        row = self.main_weight
        found = row.traffic.split("\n") if row and row.traffic else []
        words = {
            "nothing": "it is used as it is stored",
            "weight": "sent in a step: the weight, fetched for its use",
            "gradient": "sent in a step: its gradient, added up over the devices",
            "weight, gradient": "sent in a step: the weight, fetched for its use, and its gradient, added up",
        }
        return words.get(found[0], "") if len(found) == 1 else ""

    @property
    def too_large(self) -> "StrategyRow | None":
        """The fastest of the known strategies, where none of them fits."""
        known = [row for row in self.strategies if row.cost is not None and row.name != THIS]
        return min(known, key=lambda row: row.cost or 0.0, default=None) if known and not self.best_known else None

    @property
    def best_other(self) -> Alternative | None:
        """What the operator of the main weight could do best instead, if that was looked at."""
        row, found = self.main_weight, self.findings.what_if
        module = row.name.removesuffix(".weight").rpartition(".")[2] if row else ""
        subjects = [op.subject for op in found.operators] if found else []
        subject = next((s for s in subjects if module and s.name.endswith(module)), None)
        others = [a for a in subject.alternatives if a.cost is not None] if subject else []
        return min(others, key=lambda a: a.cost or 0.0, default=None)

    # -------------------------------------------------------------------------------------------- tables

    @property
    def blocks(self) -> "list[BlockTime]":
        return [
            BlockTime(block_label(self.plan, b.name), b)
            for b in self.plan.blocks
            if b.operators or b.compute or b.communication
        ]

    @property
    def kinds(self) -> list[tuple[str, int, float]]:
        """Operators by kind: how many in all copies, and seconds of a step, the most first."""
        number, seconds = Counter[str](), dict[str, float]()
        for op in self.plan.operators:
            again = op.forward + op.sent_forward if op.again else 0.0
            number[kind(op.target)] += op.copies
            seconds[kind(op.target)] = seconds.get(kind(op.target), 0.0) + op.copies * (op.seconds + again)
        return [(name, number[name], s) for name, s in sorted(seconds.items(), key=lambda one: -one[1]) if s]

    @property
    def weights(self) -> list[WeightRow]:
        return rows_of(self.plan)

    @property
    def memory(self) -> list[tuple[str, int]]:
        return [(kind_of_memory(self.plan, kind), size) for kind, size in self.plan.memory.items() if size]

    @property
    def strategies(self) -> "list[StrategyRow]":
        """This plan first, then what it is compared with."""
        plan = self.plan
        *outer, last = plan.mesh["names"]
        rest = f", batch over {', '.join(outer)}" if outer else ""
        own = "the fastest of all plans that fit" if self.optimal else "the fastest that was found and fits"
        rows = [StrategyRow(THIS, plan.cost, 1.0, plan.seconds, self.used, True, own if self.fits else "")]
        for name, figures in plan.baselines.items():
            words = STRATEGIES.get(name, "").format(last=last, rest=rest)
            if figures.get("cost") is None:
                rows.append(StrategyRow(name, None, 0.0, {}, 0, True, figures.get("why", "")))
            else:
                cost, memory = float(figures["cost"]), float(figures.get("memory", 0))
                ratio = cost / plan.cost if plan.cost else 1.0
                times = figures.get("seconds")
                times = times if isinstance(times, dict) else {}
                rows.append(StrategyRow(name, cost, ratio, times, memory, memory <= self.allowed, words))
        return rows

    @property
    def meshes(self) -> list[dict[str, Any]]:
        return [row.to_dict() | {"text": str(row.mesh)} for row in self.findings.meshes]

    # ------------------------------------------------------------------------------------ for the scripts

    @property
    def simulated(self) -> SimulatedStep | None:
        return simulate(self.plan)

    @property
    def drawable(self) -> bool:
        return drawable(self.plan)

    def data(self) -> dict[str, Any]:
        plan = self.plan
        kinds = {kind: kind_of_memory(plan, kind) for kind in plan.memory}
        copies = [copy.path for copy in plan.assignment.structure.copies]
        data: dict[str, Any] = {
            "letter": self.letter, "model": plan.model, "mesh": plan.mesh, "per_node": plan.cluster["per_node"],
            "cost": plan.cost, "training": plan.training, "splits": split_names(plan), "kinds": kinds,
            "main": self._main_operator(), "allowed": self.allowed, **weights_data(plan),
            "timeline": [{"phase": p.phase, "copy": p.copy, "nbytes": p.nbytes} for p in plan.timeline],
            "copies": copies, "curve": self._curve(), "streams": streams_data(self.simulated, copies),
        }  # fmt: skip
        if self.drawable:
            data |= {"blocks": blocks_data(plan), "links": links_data(plan), "alternatives": list(self._what_if())}
        return data

    def _main_operator(self) -> tuple[int, int] | None:
        """The one that reads the main weight, by the numbers of its block and of its place there."""
        name = self.main_weight.name.split("\n")[0] if self.main_weight else ""
        for b, operators in enumerate(operators_by_block(self.plan)):
            for i, op in enumerate(operators):
                if name in op.weights:
                    return b, i
        return None

    @property
    def untried(self) -> str:
        """Why an operator has no alternatives to show."""
        found = self.findings.what_if
        again = self.name or "MODEL"
        if found is None and self.from_python:
            return "They need the model: make the report with `tapas report MODEL`."
        if found is None:
            command = f"tapas report {again} --alternatives 60 -o plan.html"
            return f"They need the model: `{command}` makes it again and looks at them."
        if found.left:
            return (
                f"Not looked at: only operators with weights are, and {found.seconds:g} s were not enough for "
                f"{found.left} of them (--alternatives SECONDS gives more time)."
            )
        return "Not looked at: only operators with weights are. `tapas explain` looks at any."

    def _what_if(self) -> Iterator[dict[str, Any]]:
        found = self.findings.what_if
        home = {number: b for b, block in enumerate(self.plan.blocks) for number in block.numbers}
        for op in found.operators if found else ():
            for block in sorted({home[copy] for copy in op.copies if copy in home}):
                yield {"block": block, "operator": op.operator, "others": self._alternatives(op),
                       "untried": op.subject.untried}  # fmt: skip

    def _alternatives(self, op: ExplainedOperator) -> list[dict[str, Any]]:
        return [
            {"axis": a.axis, "does": a.does, "cost": a.cost, "nbytes": a.nbytes, "why": self._why(a)}
            for a in op.subject.alternatives
        ]

    def _why(self, other: Alternative) -> str:
        if other.move is None or other.move_seconds <= 0:
            return ""
        ways = [f"{sent} {way}" for way in ("forward", "backward") if (sent := steps(other.move, way))]
        name = label(self.plan, other.move).removeprefix(f"{other.move.block}.")
        return f"the most of it for {name}: {', '.join(ways)}" if ways else ""

    def _curve(self) -> list[dict[str, Any]]:
        curve = self.findings.curve
        return curve.to_dict()["points"] if curve else []


THIS = "this plan"


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of a step that all copies of a block take."""

    label: str
    block: PlanBlock

    @property
    def compute(self) -> float:
        return self.block.copies * self.block.compute

    @property
    def waited(self) -> float:
        return self.block.copies * self.block.communication

    @property
    def hidden(self) -> float:
        return self.block.copies * self.block.hidden

    @property
    def total(self) -> float:
        return self.compute + self.waited

    @property
    def again(self) -> str:
        return RECOMPUTED.get(self.block.recompute, self.block.recompute)


@dataclass(frozen=True, slots=True)
class StrategyRow:
    name: str
    cost: float | None  # None: it cannot be applied
    ratio: float  # to this plan
    seconds: dict[str, float]
    memory: float
    fits: bool
    words: str

    @property
    def waited(self) -> float:
        return float(self.seconds.get("communication", 0.0))

    @property
    def compute(self) -> float:
        return max(0.0, (self.cost or 0.0) - self.waited)

    @property
    def hidden(self) -> float:
        return float(self.seconds.get("hidden", 0.0))
