"""`tapas zoo`: model types of transformers, each made small, planned and verified in a process of its own.

`python -m tapas.verify.zoo TYPE` does one and prints what came of it as JSON; the results of many are lines of JSON in
a file, so that a run that was stopped goes on where it was.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
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


@dataclass(frozen=True, slots=True)
class ZooRow:
    type: str
    outcome: str = "unbuilt"
    why: str = ""
    model: str = ""  # the class
    parameters: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()  # of the plan


def examine_type(model_type: str, mesh: str = MESH) -> ZooRow:
    """Build it, run it, plan it and verify the plan, on ranks that are threads."""
    start, row = time.perf_counter(), ZooRow(model_type)
    for stage in (_built, _planned):
        row = stage(row, mesh)
        if row.why or row.outcome == "verified":
            break
    return replace(row, seconds=round(time.perf_counter() - start, 1))


def _built(row: ZooRow, mesh: str) -> ZooRow:
    import torch

    from tapas.models.tiny import tiny_model

    try:
        model, inputs = tiny_model(row.type)
        with torch.no_grad():
            model(**inputs)
    except Exception as error:  # whatever a small configuration, or made-up inputs, are not good enough for
        return replace(row, why=_words(error))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return replace(row, outcome="crash", model=type(model).__name__, parameters=parameters)


def _planned(row: ZooRow, mesh: str) -> ZooRow:
    from tapas.hardware.mesh import parse_mesh
    from tapas.models.tiny import tiny_model
    from tapas.planner.pipeline import plan_model
    from tapas.planner.request import Request
    from tapas.verify.verification import verify_model

    model, inputs = tiny_model(row.type)  # anew: some keep what they were called with
    request = Request.of(parse_mesh(mesh), baselines=False)
    try:
        plan = plan_model(model, inputs, request, row.type)
    except TapasError as error:
        return replace(row, outcome="refused", why=str(error))
    except Exception as error:
        return replace(row, why=_words(error))
    row = replace(row, outcome="planned", notes=tuple(plan.warnings))
    try:
        report = verify_model(model, inputs, plan, in_process=True, steps=2, name=row.type)
    except Exception as error:
        return replace(row, why=_words(error))
    if report.ok:
        return replace(row, outcome="verified")
    wrong = [f"{check.what} at {check.where}" for check in report.checks if not check.ok]
    return replace(row, outcome="differs", why="; ".join(wrong) or "what is sent is not what was predicted")


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, TapasError) else f"{type(error).__name__}: {text}"


# -- many ----------------------------------------------------------------------------------------


def all_types() -> list[str]:
    from tapas.models.hub import library

    return sorted(library().CONFIG_MAPPING.keys())


def examined(path: Path) -> dict[str, ZooRow]:
    """What a file of results has so far, by type."""
    if not path.exists():
        return {}
    names = {field.name for field in fields(ZooRow)}
    found: dict[str, ZooRow] = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            data = json.loads(text)
            data["notes"] = tuple(data.get("notes", ()))
            found[data["type"]] = ZooRow(**{name: value for name, value in data.items() if name in names})
        except (ValueError, TypeError, KeyError):
            raise TapasError(f"{path}:{number}", "is not a result of the zoo", "give another file") from None
    return found


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
    command = [sys.executable, "-m", "tapas.verify.zoo", model_type]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return ZooRow(model_type, "timeout", f"it takes more than {timeout:g} s", seconds=timeout)
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        return ZooRow(model_type, "crash", f"its process ended with {ended.returncode}: {last[:300]}")
    data: dict[str, Any] = json.loads(lines[-1])
    data["notes"] = tuple(data["notes"])
    return ZooRow(**data)


def shares(rows: Iterable[ZooRow]) -> dict[str, Any]:
    """How many of those that run here were planned and verified."""
    running = [row for row in rows if row.outcome != "unbuilt"]
    planned = [row for row in running if row.outcome in ("verified", "differs", "planned")]
    verified = [row for row in running if row.outcome == "verified"]
    return {"run": len(running), "planned": len(planned), "verified": len(verified)}


def zoo_text(rows: Iterable[ZooRow]) -> str:
    """The page: all types, and the reasons of those that are not verified."""
    rows = list(rows)
    found = shares(rows)
    run = max(found["run"], 1)
    lines = [
        "# The zoo", "",
        "Written by `tapas zoo --page`: model types of transformers, each with a small configuration and made-up "
        "inputs (a training step where the class computes a loss), planned on a mesh of "
        f"{MESH} and verified on ranks that are threads.", "",
        f"Of {found['run']} types that run here, {found['planned']} are planned ({found['planned'] / run:.0%}) and "
        f"{found['verified']} verified ({found['verified'] / run:.0%}).", "",
    ]  # fmt: skip
    for outcome, meaning in OUTCOMES.items():
        those = [row for row in rows if row.outcome == outcome]
        if not those:
            continue
        lines += [f"## {outcome}: {len(those)}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        if outcome == "verified":
            lines += [", ".join(f"{row.type} ({row.model})" for row in those), ""]
        else:
            lines += ["| type | class | reason |", "|---|---|---|"]
            lines += [f"| {row.type} | {row.model} | {row.why.replace('|', '/')} |" for row in those] + [""]
    return "\n".join(lines)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = examine_type(sys.argv[1])
    print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
