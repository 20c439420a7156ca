"""Factors that were found by trying, for operators that have no rule: where they are kept, and the rules they make.

Operators are tried in a process of their own, since some crash when they are given what does not fit.
"""

import faulthandler
import hashlib
import json
import os
import select
import signal
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from tapas.errors import GraphError, TapasError
from tapas.ir.graph import BLOCK, Graph
from tapas.rules.base import Call, Rule, registered
from tapas.rules.notation import einsum
from tapas.util import VERSION, Progress, silent, write_file

FUNCTION, REGION = "tapas.function.default", "tapas.region.default"
# Code of others may change from run to run without its name: what is found about it is not kept any longer.
KEPT = ("aten", "prims")
CPU_SECONDS, SECONDS, CRASHES = 30, 120.0, 24
Findings = Mapping[str, str]  # by `pattern_key`
_seen: dict[str, str] = {}  # by `_facts`


def pattern_key(call: Call) -> str:
    """What findings go by: the operator, its constants, and which dims have one element."""
    shapes = [",".join("1" if size == 1 else "n" for size in t.shape) for t in (*call.operands, *call.results)]
    return f"{call.target}{call.args}{dict(call.kwargs)} {'; '.join(shapes)}"


def _facts(call: Call) -> str:
    """All that a finding depends on."""
    import torch

    from tapas.ir.interpreter import resolve

    schema = getattr(resolve(call.target), "_schema", "")
    tensors = [(t.shape, t.dtype, t.differentiable) for t in (*call.operands, *call.results)]
    return f"TAPAS {VERSION}, torch {torch.__version__}: {schema} {call.args} {call.kwargs} {tensors}"


def eligible(call: Call) -> bool:
    """Whether it is one to try: it has no rule, and a rule is of use."""
    known = call.target in registered() and call.target != FUNCTION
    if known or call.target in (REGION, BLOCK) or not any(size > 1 for t in call.operands for size in t.shape):
        return False
    import torch

    from tapas.ir.interpreter import resolve

    try:
        return torch.Tag.nondeterministic_seeded not in getattr(resolve(call.target), "tags", ())
    except AttributeError:  # an operator of a library that is not loaded here
        return False


def found_rule(call: Call, findings: Findings) -> Rule | None:
    """The rule of a call by what was found; None if nothing was."""
    if not findings or (call.target in registered() and call.target != FUNCTION):
        return None
    factors = findings.get(pattern_key(call), "")
    if not factors:
        return None
    from tapas.rules.unregistered import without_rule

    own = call.target == FUNCTION
    known = Rule(own_gradient=True, unknown_work=True) if own else without_rule(call)
    try:
        split = einsum(factors, call).factors
    except (GraphError, ValueError, KeyError):
        raise TapasError(call.target, f"{factors!r}, of a plan, are not its factors", "make the plan again") from None
    return replace(known, factors=split, flops=known.flops / prod(f.size for f in split), missing=False)


# -- finding -----------------------------------------------------------------------------------------------------


def with_findings(graph: Graph, wanted: bool = True, progress: Progress = silent) -> Graph:
    """The graph with what can be found about those of its operators that have no rule, if that is wanted."""
    if not wanted or graph.found is not None:
        return graph
    scopes = [(graph.ops, graph.tensors), *((body.ops, body.tensors) for body in graph.bodies)]
    calls = [Call.of(op, tensors) for ops, tensors in scopes for op in ops if op.target not in (BLOCK, REGION)]
    return replace(graph, found=find([call for call in calls if eligible(call)], progress))


def find(calls: Iterable[Call], progress: Progress = silent) -> dict[str, str]:
    """The factors of calls; of those that differ in sizes only and not in these factors."""
    found: dict[str, set[str]] = {}
    for call in calls:
        progress(f"try operators without a rule: {call.target}")
        found.setdefault(pattern_key(call), set()).add(_remembered(call))
    return {key: min(factors) if len(factors) == 1 else "" for key, factors in found.items()}


def _remembered(call: Call) -> str:
    facts = _facts(call)
    if facts not in _seen:
        kept = call.target.startswith(tuple(f"{name}." for name in KEPT))
        path = cache_folder() / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"
        factors = _read(path, facts) if kept else None
        if factors is None:
            factors, certain = tried(call)
            if kept and certain:
                _write(path, facts, factors)
        _seen[facts] = factors
    return _seen[facts]


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "tapas" / "factors"


def _read(path: Path, facts: str) -> str | None:
    try:
        data = json.loads(path.read_text())
        return str(data["factors"]) if data["facts"] == facts else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, facts: str, factors: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({"facts": facts, "factors": factors}).encode())
    except (OSError, TapasError):  # a place that cannot be written to: it is found anew next time
        return


# -- in a process of its own -----------------------------------------------------------------------------------------


def tried(call: Call) -> tuple[str, bool]:
    """The factors of a call, and whether all was tried that should be."""
    skipped: set[int] = set()
    for _ in range(CRASHES):
        told = _child(call, skipped)
        if told and told[-1].startswith("="):
            return told[-1][1:], True
        if not told or told[-1] == "!":  # it never began, or took too long
            break
        skipped.add(int(told[-1]))  # what it was trying when it crashed
    return "", False


def _child(call: Call, skipped: set[int]) -> list[str]:
    """What a process tells that tries a call: numbers of what it is trying, and what it found after `=`."""
    if not hasattr(os, "fork"):
        return []
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: what they hold is of no use to the child
        process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            _try(call, skipped, writing)
        finally:
            os._exit(0)
    os.close(writing)
    told, late = b"", False
    while not late:
        ready, _, _ = select.select([reading], [], [], SECONDS)
        late = not ready
        part = os.read(reading, 65536) if ready else b""
        told += part
        if not part:
            break
    os.close(reading)
    if late:
        os.kill(process, signal.SIGKILL)
    ended = os.waitpid(process, 0)[1]
    late = late or (os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGXCPU)
    return [*told.decode().split("\n")[:-1], *(["!"] if late else [])]


def _try(call: Call, skipped: set[int], writing: int) -> None:
    import resource

    import torch

    from tapas.rules.discovery import discover

    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, used + CPU_SECONDS + 1))
    faulthandler.disable()  # a crash is none of the parent's
    torch.set_num_threads(1)  # threads do not survive a fork
    warnings.simplefilter("ignore")

    def tell(what: object) -> None:
        os.write(writing, f"{what}\n".encode())

    tell(f"={discover(call, skipped, tell)}")
