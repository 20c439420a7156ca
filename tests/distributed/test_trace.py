"""A recorded step of real processes: everything that is planned to be sent is in the trace, with its bytes."""

import gzip
import json
import pickle
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tapas.cli.main import app
from tapas.hardware.cluster import COLLECTIVES
from tapas.hardware.mesh import Mesh, parse_mesh
from tapas.plan.assignment import gathered_ahead, journeys, saved_weights
from tapas.plan.lanes import AHEAD, BEHIND, COMPUTE, MOVES
from tapas.plan.traffic import predicted
from tapas.planner.pipeline import decided
from tapas.planner.request import Request
from tapas.rules.base import RECOMPUTED, gathered_again
from tapas.sharding.route import walked
from tapas.verify.recorded_step import RecordedStep, record_step
from tapas.verify.timeline import ROLES
from tapas.verify.trace import Trace, TraceRequest, chrome_trace, trace_of
from tapas.verify.trial import Trial
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER
from tests.subjects import small_subject


def trial_of(family: str, mesh: str, pin: str, recompute: str, pieces: int) -> Trial:
    subject = small_subject(family)
    request = Request.of(mesh, EAGER, pins={"*": pin}, recompute=recompute, baselines=False, pieces=pieces)
    assignment = decided(subject.graph, subject.folded, request)
    return Trial(subject.graph, subject.folded, request.mesh, assignment, subject.leaves(), 1)


def record(rank: int, trial: bytes) -> RecordedStep:
    return record_step(pickle.loads(trial), "cpu")


@cache
def recorded(
    pool: Pool, family: str, mesh: str, pin: str, recompute: str, pieces: int = 1
) -> tuple[Trial, Trace, list[dict[str, Any]]]:
    """A trial, and a step of it on all workers."""
    trial = trial_of(family, mesh, pin, recompute, pieces)
    ranks = pool(record, pickle.dumps(trial))
    trace = trace_of(ranks, trial, TraceRequest(Path("nowhere.json")))
    return trial, trace, json.loads(json.dumps(list(chrome_trace(ranks))))


def lanes_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def check_form(events: list[dict[str, Any]], mesh: Mesh) -> None:
    """What Perfetto wants: every rank and lane is named, and the spans of a lane lie in each other or apart."""
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(ranks) == list(range(mesh.devices))
    lanes = lanes_of(events)
    assert sum(name.startswith(COMPUTE) for name in lanes.values()) == mesh.devices  # nobody computes beside another
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for e in (e for e in events if e["ph"] == "X"):
        assert e["dur"] >= 0 and (e["pid"], e["tid"]) in lanes
        spans[e["pid"], e["tid"]].append((e["ts"], -(e["ts"] + e["dur"])))
    for lane in spans.values():
        open_ends: list[float] = []
        for start, end in sorted(lane):
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or -end <= open_ends[-1] + 1e-3
            open_ends.append(-end)


def sent_of(events: list[dict[str, Any]], rank: int) -> Counter[tuple[str, str, tuple[str, ...]]]:
    nbytes: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for e in events:
        if e["ph"] == "X" and e["cat"] == "collective" and e["pid"] == rank:
            nbytes[e["args"]["phase"], e["args"]["kind"], tuple(e["args"]["axes"])] += e["args"]["nbytes"]
    return +nbytes


def planned_collectives(trial: Trial) -> Counter[str]:
    """How many moves and gathers a plan over one axis has, without those within operators."""
    planned: Counter[str] = Counter()
    folded, tensors = trial.folded, trial.folded.tensors
    for copy, number in zip(folded.copies, trial.assignment.copies, strict=True):
        block, decision = folded.blocks[copy.block], trial.assignment.decisions[number]
        stored, saved, mode = set(block.weights), saved_weights(block, tensors), decision.recompute
        times = set[int]()
        for journey in journeys(block, tensors, decision):
            ahead = journey.tensor in stored
            stored.discard(journey.tensor)
            for _, hop in walked(journey.start, journey.route):
                ahead = ahead and gathered_ahead(hop)
                if ahead and hop.forward == "all_gather":
                    again = gathered_again(mode, journey.tensor in block.exports, journey.tensor in saved)
                    times.add(1 + again)
                elif not ahead:
                    planned[MOVES] += (hop.forward in COLLECTIVES) * (1 + (mode in RECOMPUTED))
                    planned[MOVES] += hop.backward in COLLECTIVES and journey.back
        planned[AHEAD] += max(times, default=0)
    return planned


full = pytest.mark.full
CASES = [
    ("llama", "4", "fsdp", "gather", 1), ("llama", "4", "megatron", "block", 1),
    ("mixtral", "2x2", "fsdp", "selective", 1), ("llama", "4", "[ring]", "block", 1),
    pytest.param("llama", "4", "fsdp", "none", 1, marks=full),
    pytest.param("llama", "2x2", "megatron", "none", 1, marks=full),
    pytest.param("gpt2", "2x2", "megatron-sp", "selective", 1, marks=full),
    pytest.param("llama", "2x2", "megatron-sp", "none", 2, marks=full),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh", "pin", "recompute", "pieces"), CASES)
def test_all_that_is_planned_is_in_the_trace(
    pool: Pool, family: str, mesh: str, pin: str, recompute: str, pieces: int
) -> None:
    trial, trace, events = recorded(pool, family, mesh, pin, recompute, pieces)
    check_form(events, trial.mesh)
    wanted = {
        (phase, kind, tuple(trial.mesh.names[a] for a in axes)): nbytes
        for (phase, kind, axes), nbytes in predicted(trial.folded, trial.assignment).items()
        if nbytes
    }
    assert wanted
    every = [sent_of(events, rank) for rank in range(trial.mesh.devices)]
    assert {key: max(sent[key] for sent in every) for sent in every for key in sent} == wanted
    assert all(sent.ok for sent in trace.sent)
    for ranks in zip(*trace.ranks, strict=True):
        for overlap in ranks:
            assert 0 <= overlap.hidden <= overlap.seconds
            assert (overlap.seconds > 0) == (overlap.collectives > 0)
    moves, ahead, behind = trace.overlaps
    assert moves.hidden == 0 or pieces > 1
    told = json.loads(json.dumps(trace.to_dict()))["overlaps"]
    assert [row["role"] for row in told] == [*ROLES, "total"]
    assert all(row["share"] is None or 0 <= row["share"] <= 1 for row in told)
    assert trace.total.nbytes <= sum(wanted.values())
    if len(trial.mesh.sizes) == 1:
        planned = planned_collectives(trial)
        assert ahead.collectives == planned[AHEAD]
        within = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and lanes_of(events)[0, e["tid"]] == MOVES]
        assert sum("move" in e["args"] for e in within) == planned[MOVES]
        assert len(within) == moves.collectives
    if pin == "fsdp":  # gloo does not say when these are done: the profiler does
        assert ahead.collectives > 0 and behind.collectives > 0
        assert any(kind == "reduce_scatter" for phase, kind, _ in wanted if phase == "backward")


def test_operators_have_their_names_in_both_passes(pool: Pool) -> None:
    trial, _, events = recorded(pool, "llama", "4", "megatron", "block")
    operators = [e for e in events if e["ph"] == "X" and e["cat"] == "operator" and e["pid"] == 1]
    for op in trial.graph.ops:
        phases = Counter(e["args"]["phase"] for e in operators if e["args"].get("operator") == op.name)
        assert phases["forward"] == 1, op
        if op.target == "aten.linear.default":
            assert phases["backward"] >= 1 and phases["computed again"] <= 1, op
    again = {e["args"]["module"] for e in operators if e["args"].get("phase") == "computed again"}
    linears = {op.module for op in trial.graph.ops if op.target == "aten.linear.default" and ".layers." in op.module}
    assert linears and linears <= again


MODEL = (
    "hf:llama", "--set", "num_hidden_layers=2", "--set", "hidden_size=64", "--set", "intermediate_size=96", "--set",
    "num_attention_heads=4", "--set", "num_key_value_heads=2", "--set", "vocab_size=64", "--batch", "4", "--seq", "16",
)  # fmt: skip


@full
def test_verify_prints_what_was_hidden(tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    asked = ["--mesh", "2", "--steps", "1", "--pin", "*=fsdp", "--trace", str(path)]
    result = CliRunner().invoke(app, ["verify", *MODEL, *asked], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Sent and hidden in a recorded step" in result.output and str(path) in result.output
    shown = {role: line.split()[-1] for line in result.output.splitlines() for role in ROLES if line.startswith(role)}
    assert shown[MOVES] == "0%" and shown[AHEAD].endswith("%") and shown[BEHIND].endswith("%")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    check_form(events, parse_mesh("2"))
    assert set(ROLES) <= {name.partition(" (")[0] for name in lanes_of(events).values()}
    weights = [w for e in events if e["ph"] == "X" and e["cat"] == "collective" for w in e["args"].get("weights", ())]
    assert any(weight.startswith("model.layers.1.") for weight in weights)
