"""The command, or the call, that makes a plan again."""

import shlex
from typing import Any

from tapas.hardware.cluster_files import cluster_to_dict, clusters
from tapas.plan.plan import Plan, mesh_of


def cluster_option(plan: Plan) -> str:
    """A preset by its name; another one comes from a file whose path nobody kept."""
    name = plan.cluster["name"]
    preset = clusters().get(name)
    return name if preset is not None and cluster_to_dict(preset) == plan.cluster else f"{name}.toml"


def command(plan: Plan) -> str:
    """For a shell; in Python, where the plan came from there."""
    source: dict[str, Any] = plan.source
    if "model" not in source:
        mesh = ", ".join(f"{n!r}: {s}" for n, s in zip(plan.mesh["names"], plan.mesh["sizes"], strict=True))
        return f"tapas.plan(model, inputs, mesh={{{mesh}}}, cluster={cluster_option(plan)!r}{_keywords(source)})"
    words = ["tapas", "plan", source["model"], "--mesh", str(mesh_of(plan)), "--cluster", cluster_option(plan)]
    for name in ("batch", "seq", "dtype"):
        if source.get(name):
            words += [f"--{name}", str(source[name])]
    for name, value in source.get("settings", {}).items():
        words += ["--set", f"{name}={value}"]
    for option, key in (("--pin", "pins"), ("--forbid", "forbid")):
        for value in source.get(key, ()):
            words += [option, value]
    flags = {"--inference": source.get("training") is False, "--no-batch-split": source.get("batch_split") is False,
             "--no-master": source.get("master") is False, "--no-baselines": not plan.baselines,
             "--compile": source.get("compile", False)}  # fmt: skip
    words += [flag for flag, given in flags.items() if given]
    for option, default in (("memory", "device"), ("optimizer", "adam"), ("recompute", "auto")):
        if source.get(option, default) != default:
            words += [f"--{option}", _amount(source[option])]
    for option in ("pieces", "accumulate", "capacity"):
        if source.get(option, 1) != 1:
            words += [f"--{option}", str(source[option])]
    return " ".join(shlex.quote(str(word)) for word in words)


def _amount(value: Any) -> str:
    """Memory that was given as a number is bytes."""
    return value if isinstance(value, str) else f"{value}B"


def _keywords(source: dict[str, Any]) -> str:
    """What differs from the defaults of `tapas.plan`."""
    defaults = {"training": None, "pins": [], "forbid": [], "batch_split": True, "memory": "device",
                "optimizer": "adam", "recompute": "auto", "losses": [],
                "pieces": 1, "compile": False, "accumulate": 1, "capacity": None}  # fmt: skip
    given = {name: source[name] for name, usual in defaults.items() if name in source and source[name] != usual}
    return "".join(f", {name}={value!r}" for name, value in given.items())
