"""`tapas zoo`: model types of transformers, each made small, planned and verified in a process of its own.

Results are lines of JSON in a file, so that a run that was stopped goes on where it was.
"""

import json
import multiprocessing
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tapas.errors import TapasError
from tapas.util import write_file

OUTCOMES = {
    "verified": "planned, and outputs, gradients, weights and bytes are those of the original",
    "differs": "planned, and something is not as in the original",
    "planned": "planned, but it could not be verified",
    "refused": "no plan: the reason is told",
    "crash": "no plan: a defect",
    "timeout": "took too long",
    "unbuilt": "no small model of it, or no inputs: it does not run here at all",
}
MESH = "2"
# `import transformers` alone imports next to nothing.
PRELOADED = ["transformers.modeling_utils", "tapas.models.tiny_trials", "tapas.verify.verification"]


@dataclass(frozen=True, slots=True)
class ZooRow:
    type: str
    outcome: str = "unbuilt"
    why: str = ""
    model: str = ""  # the class
    parameters: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()  # of the plan
    tensor_share: float | None = None  # of the parameters' bytes, see tensor_share.py
    whole: tuple[str, ...] = ()  # parameters that it leaves whole, with the reason
    cost: float | None = None  # seconds a step with the batch whole, and
    library_cost: float | None = None  # by transformers' own base_model_tp_plan, where it can be followed


def examine_type(model_type: str, mesh: str = MESH) -> ZooRow:
    """Build it, run it, plan it and verify the plan, on ranks that are threads."""
    from tapas.models.tiny_trials import tiny_model

    start, row = time.perf_counter(), ZooRow(model_type)
    try:
        model, inputs = tiny_model(model_type)
    except Exception as error:  # whatever a small configuration, or made-up inputs, are not good enough for
        row = replace(row, why=_words(error))
    else:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        row = replace(row, outcome="crash", model=type(model).__name__, parameters=parameters)
        row = _planned(row, model, inputs, mesh)
    return replace(row, seconds=round(time.perf_counter() - start, 1))


def _planned(row: ZooRow, model: Any, inputs: Any, mesh: str) -> ZooRow:
    """The best plan, and one that leaves the batch whole and splits the use of every parameter that it can."""
    from tapas.capture import capture_program
    from tapas.planner.pipeline import plan_graph, tp_hints
    from tapas.planner.request import Request
    from tapas.verify.subject import subject_of
    from tapas.verify.tensor_share import tensor_share

    hints = tp_hints(model)
    try:
        captured = capture_program(model, inputs, name=row.type)
        graph = captured.graph
        best = plan_graph(graph, Request.of(mesh, baselines=False), hints)
        tensor = tensor_share(graph, mesh)
        beside = plan_graph(graph, Request.of(mesh, batch_split=False, baselines=("hf",)), hints)
    except TapasError as error:
        return replace(row, outcome="refused", why=str(error))
    except Exception as error:
        return replace(row, why=_words(error))
    row = replace(
        row, outcome="planned", notes=tuple(best.warnings), tensor_share=tensor.share, whole=tensor.whole,
        cost=beside.cost, library_cost=beside.baselines.get("hf", {}).get("cost"),
    )  # fmt: skip
    subject = subject_of(model, inputs, captured)  # once for both: it takes as long as all else
    for name, plan in (("tensor only", tensor.plan), ("best", best)):
        row = _verified(row, subject, name, plan)
        if row.outcome != "verified":
            break
    return row


def _verified(row: ZooRow, subject: Any, name: str, plan: Any) -> ZooRow:
    from tapas.planner.pipeline import decided, router_of
    from tapas.verify.verification import examine

    try:
        assignment = decided(subject.graph, subject.folded, plan)
        report = examine(subject, assignment, router_of(plan), in_process=True, steps=2 if name != "best" else 1)
    except Exception as error:
        return replace(row, outcome="planned", why=f"{name}: {_words(error)}")
    if report.ok:
        return replace(row, outcome="verified")
    wrong = [f"{check.what} at {check.where}" for check in report.checks if not check.ok]
    text = "; ".join(wrong) or "what is sent is not what was predicted"
    return replace(row, outcome="differs", why=f"{name}: {text}"[:600])


def _words(error: Exception) -> str:
    text = re.sub(r"/\S*/site-packages/", "", " ".join(str(error).split()))[:400]  # wherever it is installed
    return text if isinstance(error, TapasError) else f"{type(error).__name__}: {text}"


# -- many ----------------------------------------------------------------------------------------


def all_types() -> list[str]:
    from tapas.models.hub import library

    return sorted(library().CONFIG_MAPPING.keys())


def examined(path: Path) -> dict[str, ZooRow]:
    """What a file of results has so far, by type."""
    if not path.exists():
        return {}
    found: dict[str, ZooRow] = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            row = _row(json.loads(text))
            found[row.type] = row
        except (ValueError, TypeError, KeyError):
            raise TapasError(f"{path}:{number}", "is not a result of the zoo", "give another file") from None
    return found


def _row(data: dict[str, Any]) -> ZooRow:
    names = {field.name for field in fields(ZooRow)}
    lists = {name: tuple(data.get(name, ())) for name in ("notes", "whole")}
    return ZooRow(**{name: value for name, value in {**data, **lists}.items() if name in names})


def run_zoo(
    types: Sequence[str], path: Path, jobs: int, timeout: float, done: Callable[[ZooRow], None]
) -> dict[str, ZooRow]:
    """Examine those types that the file does not have yet; it is written after each of them."""
    rows = examined(path)
    waiting = [name for name in dict.fromkeys(types) if name not in rows]
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda name: in_process_of_its_own(name, timeout), waiting):
            rows[row.type] = row
            lines = [json.dumps(asdict(rows[name])) for name in sorted(rows)]
            write_file(path, "".join(f"{line}\n" for line in lines).encode())
            done(row)
    return {name: rows[name] for name in sorted(rows)}


def in_process_of_its_own(model_type: str, timeout: float) -> ZooRow:
    """Forked from one that has imported what takes as long as all the rest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        said, (ours, theirs) = Path(folder, "said"), context.Pipe(duplex=False)
        process = context.Process(target=_examine, args=(model_type, theirs, said))
        process.start()
        theirs.close()
        try:
            if ours.poll(timeout):
                return _row(json.loads(ours.recv()))
            return ZooRow(model_type, "timeout", f"it takes more than {timeout:g} s", seconds=timeout)
        except EOFError:
            process.join()
            last = (said.read_text(errors="replace").strip().splitlines() or [""])[-1]
            return ZooRow(model_type, "crash", f"its process ended with {process.exitcode}: {last[:300]}")
        finally:
            process.kill()
            process.join()


def _examine(model_type: str, answer: Connection, said: Path) -> None:
    import torch

    output = os.open(said, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = examine_type(model_type)
    answer.send(json.dumps(asdict(row)))
