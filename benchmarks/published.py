"""Published training runs, replayed: predicted seconds of the same model, strategy, mesh, batch and recomputation.

    python benchmarks/published.py [--rows ID ...] [--plot docs/published.svg]

The runs are in published.json, each with its source. Weights are in bfloat16 with a float32 copy, as in mixed
precision; models that are not gated are built as GPT-2 (learned positions, biases). Weights that a run frees after the
forward pass (ZeRO-3) are gathered again; "selective layer" and "selective" compute every second block again (the
fraction is known for the former and assumed for the latter). What a run does once for several passes counts as often:
the optimizer, and reductions of gradients of whole weights. What a run's program is known to do that the best plan of
its strategy does not is in _programs.py. Eager and compiled seconds are predicted; where a run does not say which it
was, the nearer ones count.
"""

import json
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _programs import Row, more_seconds, of_weight, program_of
from _results import Results, parser_for

from tapas.capture import capture
from tapas.cost.memory import Optimizer
from tapas.hardware.cluster import Cluster
from tapas.hardware.cluster_files import load_cluster
from tapas.ir.graph import Graph
from tapas.planner.pipeline import within
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.report.pictures import check_plot, save_picture

HERE = Path(__file__).parent
NEAR = 0.2
BOARD = 4  # devices of one without a switch
DROPOUT = 0.1  # where there is any
LOSS = "*cross_entropy*"
CLUSTERS = {"A100 80GB": "a100-80g", "A100 40GB": "a100-40g", "H100": "h100-sxm", "H200": "h200-sxm"}
SOURCES = {"torchtitan": "torchtitan", "Kempner": "KempnerForge", "Megatron": "Megatron-LM", "fms-fsdp": "fms-fsdp",
           "llm-foundry": "llm-foundry"}  # fmt: skip
# recompute -> modes of blocks, of which as many have each
MODES = {"none": ("none",), "full": ("block",), "selective op": ("selective",), "selective layer": ("none", "block"),
         "selective": ("none", "block")}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replayed:
    row: Row
    strategy: str
    mesh: str
    eager: float
    compiled: float

    @property
    def seconds(self) -> float:
        known = {True: [self.compiled], False: [self.eager], None: [self.eager, self.compiled]}
        return min(known[self.row["compile"]], key=lambda seconds: abs(seconds / self.row["pass_s"] - 1))

    @property
    def ratio(self) -> float:
        return self.seconds / self.row["pass_s"]

    @property
    def source(self) -> str:
        return next(name for key, name in SOURCES.items() if key in self.row["source"])


def cluster_of(row: Row) -> Cluster:
    cluster = load_cluster(next(name for key, name in CLUSTERS.items() if row["gpu"].startswith(key)))
    device = cluster.device
    if "2.4 TB/s" in row["gpu"]:
        device = replace(device, memory_bytes_per_s=2.4e12)
    per_node = row["gpus_per_node"]
    return replace(cluster, per_node=per_node, device=device, switched=per_node != BOARD)


def mesh_and_strategy(row: Row) -> tuple[str, str]:
    """Nodes are an axis of their own where nothing else is."""
    data, tensor, inside = row["gpus"] // row["tp"], row["tp"], row["gpus_per_node"]
    if tensor == 1:
        mesh = f"{data // inside}x{inside}" if data > inside else str(data)
        if row["zero_stage"] == 0 or row["gpus"] == 1:
            return mesh, "ddp"
        if row["dp_replicate"] > 1:
            return f"{row['dp_replicate']}x{row['dp_shard']}", "hsdp"
        return mesh, "fsdp"
    if data == 1:
        return str(tensor), "megatron-sp" if row["sequence_parallel"] else "megatron"
    if row["zero_stage"] == 3:
        return f"{data}x{tensor}", "fsdp+tp"
    return f"{data}x{tensor}", "megatron-sp" if row["sequence_parallel"] else "megatron"


@cache
def captured(arch: str, batch: int, length: int, unfused: bool = False) -> Graph:
    import transformers as T

    a, drop = json.loads(arch), DROPOUT if unfused else 0.0
    if a["gated"]:
        config: Any = T.LlamaConfig(
            hidden_size=a["hidden"], intermediate_size=a["ffn"], num_hidden_layers=a["layers"],
            num_attention_heads=a["heads"], num_key_value_heads=a["kv_heads"], vocab_size=a["vocab"],
            max_position_embeddings=length, tie_word_embeddings=a["tied"], use_cache=False,
        )  # fmt: skip
    else:
        config = T.GPT2Config(
            n_embd=a["hidden"], n_inner=a["ffn"], n_layer=a["layers"], n_head=a["heads"], vocab_size=a["vocab"],
            n_positions=length, tie_word_embeddings=a["tied"], use_cache=False, resid_pdrop=drop, embd_pdrop=drop,
            attn_pdrop=drop, activation_function="gelu", attn_implementation="eager" if unfused else "sdpa",
        )  # fmt: skip
    with torch.device("meta"):
        model = (T.LlamaForCausalLM if a["gated"] else T.GPT2LMHeadModel)(config).to(torch.bfloat16)
        ids = torch.zeros(batch, length, dtype=torch.long)
        return capture(model, {"input_ids": ids, "labels": ids.clone()}, training=True)


def pass_seconds(found: Solution, row: Row) -> float:
    """Of one forward and backward pass, with its part of what comes once for all passes of a step."""
    once = found.seconds()["update"]
    if row["zero_stage"] == 0:
        for group in found.groups():
            sent = (t for t in found.transfers(group) if of_weight(found, group, t))
            once += len(group.copies) * sum(transfer.seconds for transfer in sent)
    return found.answer.cost - once * (1 - 1 / row["grad_accum"])


def replay(row: Row) -> Replayed:
    mesh, strategy = mesh_and_strategy(row)
    return Replayed(row, strategy, mesh, *(predicted(row, mesh, strategy, compiled) for compiled in (False, True)))


def predicted(row: Row, mesh: str, strategy: str, compiled: bool) -> float:
    program, batch = program_of(row), round(row["batch_per_pass"])
    graph = captured(json.dumps(row["arch"], sort_keys=True), batch, row["seq"], program.unfused_attention)
    pins, seconds = {"*": strategy}, []
    if program.whole_loss:
        mesh, pins[LOSS] = mesh if "x" in mesh else f"1x{mesh}", "[batch, R]"
    for mode in MODES[row["recompute"]]:
        freed = mode == "none" and row["zero_stage"] == 3 and strategy in ("fsdp", "hsdp", "fsdp+tp")
        request = Request.of(
            mesh, cluster_of(row), training=True, pins=pins, memory=None, optimizer=Optimizer("adam"),
            recompute="gather" if freed else mode, baselines=False, compile=compiled,
        )  # fmt: skip
        found, messages = within(graph, request).best(), program.compiled if compiled else program.eager
        seconds.append(pass_seconds(found, row) + (more_seconds(found, row, messages) if messages else 0.0))
    return statistics.mean(seconds)


def spread(runs: Iterable[Replayed]) -> tuple[str, ...]:
    ratios = sorted(run.ratio for run in runs)
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    return str(len(ratios)), f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}", f"{near}"


def tensor_parallel(run: Replayed) -> str:
    return "tensor parallel" if run.row["tp"] > 1 else "data parallel alone"


def summary(runs: list[Replayed], out: Results) -> None:
    rows: list[tuple[str, ...]] = []
    for kinds in (lambda run: run.source, lambda run: run.strategy, tensor_parallel, lambda run: run.row["gpu"][:9]):
        groups = defaultdict[str, list[Replayed]](list)
        for run in runs:
            groups[kinds(run)].append(run)
        rows += [(name, *spread(some)) for name, some in groups.items()]
    rows.append(("all", *spread(runs)))
    columns = ("", "runs", "median", "least", "most", f"within {NEAR:.0%}")
    out.table("summary", "seconds of a pass, predicted / published", columns, rows)


def said(run: Replayed) -> tuple[str, ...]:
    row = run.row
    compiled = {None: "?", True: "compiled", False: "eager"}[row["compile"]]
    return (
        row["id"], run.source, row["model"], str(row["seq"]), row["gpu"][:9], run.mesh, run.strategy, row["recompute"],
        compiled, f"{row['pass_s']:.3f}", f"{run.eager:.3f}", f"{run.compiled:.3f}", f"{run.ratio:.2f}",
    )  # fmt: skip


def draw(runs: list[Replayed], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    groups = defaultdict[tuple[str, str], list[Replayed]](list)
    for run in runs:
        groups[run.source, run.strategy].append(run)
    colours = {name: f"C{i}" for i, name in enumerate(SOURCES.values())}
    marks = dict(zip(("ddp", "fsdp", "hsdp", "megatron", "megatron-sp", "fsdp+tp"), "ods^vP", strict=True))
    for (source, strategy), some in sorted(groups.items()):
        axes.scatter([r.row["pass_s"] for r in some], [r.seconds for r in some], s=22, c=colours[source],
                     marker=marks[strategy], label=f"{source}, {strategy}", alpha=0.8)  # fmt: skip
    low, high = 0.2, 100.0
    for factor, style in ((1.0, "-"), (1 - NEAR, ":"), (1 + NEAR, ":")):
        axes.plot([low, high], [factor * low, factor * high], style, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="published seconds of a pass", ylabel="predicted", xlim=(low, high),
             ylim=(low, high), title=f"{len(runs)} published training runs")  # fmt: skip
    axes.legend(fontsize=8)
    save_picture(figure, path)


def main() -> int:
    rows: list[Row] = json.loads((HERE / "published.json").read_text(encoding="utf-8"))["rows"]
    parser = parser_for(__doc__)
    parser.add_argument("--rows", nargs="+", choices=[row["id"] for row in rows], metavar="ID")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs tapas-parallel[plot])")
    chosen = parser.parse_args()
    if chosen.plot:
        check_plot(chosen.plot)
    warnings.simplefilter("ignore")
    out, runs = Results(chosen.json), []
    for row in rows:
        if chosen.rows and row["id"] not in chosen.rows:
            continue
        runs.append(run := replay(row))
        print(*said(run), flush=True)
    columns = ("run", "source", "model", "length", "GPU", "mesh", "strategy", "recompute", "compiled", "published s",
               "predicted eager s", "compiled s", "ratio")  # fmt: skip
    if out.path is not None:
        out.table("runs", "published runs", columns, [said(run) for run in runs])
    summary(runs, out)
    if chosen.plot:
        draw(runs, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
