"""Predicted against measured tokens per second of `generate` on two local ranks, for the machine as it is found.

    python benchmarks/serving.py [--models NAME ...] [--rounds N] [--cluster FILE]

Small models (a Llama, a GPT-2) continue a batch of prompts on two gloo ranks, by the best plan and by plain tensor
parallelism. Printed are predicted and measured milliseconds of a decode step and of the prefill, and the processor time
of a step: that of the parallel module, which is to be held against what is predicted for computing, and that of
`generate` around it, which chooses tokens and of which no plan knows. How busy the machine is with something else is
said. Exit code 1 if tokens per second are off by more than 30 %.
"""

import json
import os
import statistics
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _calibrated import WORLD, calibrated
from running import VOCABULARY, made, on_ranks

PINS = {"best": None, "tensor": {"*": "megatron"}}
WARM_UP = 1
BATCH, PROMPT, NEW = 8, 32, 32
OFF = 0.3


class Clock:
    """A stopping criterion that never stops, and notes when it is asked: once for every token."""

    def __init__(self) -> None:
        self.wall, self.busy = [time.perf_counter()], [time.thread_time()]

    def __call__(self, tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.wall.append(time.perf_counter())
        self.busy.append(time.thread_time())
        return torch.zeros(len(tokens), dtype=torch.bool)


def steps(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def rank(number: int, world: int, store: str, models: list[str], cluster: str, rounds: int, out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    import tapas

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=number, world_size=world)  # type: ignore[attr-defined]
    mesh, found, running = init_device_mesh("cpu", (world,)), list[dict[str, Any]](), []
    prompts = torch.randint(3, VOCABULARY, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
    for name in models:
        for strategy, pins in PINS.items():
            model: Any = made(name).eval()
            plan = tapas.plan_serving(
                model, mesh="2", cluster=cluster, memory=None, baselines=False, pins=pins, batch=BATCH, prompt=PROMPT,
                new=NEW,
            )  # fmt: skip
            served = tapas.serve(model, mesh=mesh, plan=plan)
            running.append(served)
            row = {"model": name, "strategy": strategy, "prefill": [], "step": [], "busy": [], "module": []}
            parts = [plan.decode.seconds[part] for part in ("compute", "communication")]
            found.append(row | {"parts": parts, "predicted": figures_of(plan.eager or plan.figures)})
    for _ in range(WARM_UP + rounds):
        for served, row in zip(running, found, strict=True):
            dist.barrier()
            note(served, prompts, row)
    if number == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def figures_of(figures: Any) -> list[float]:
    return [figures.first_token_seconds, figures.token_seconds]


def note(served: Any, prompts: torch.Tensor, row: dict[str, Any]) -> None:
    """A run of `generate`: its prefill, the median of its steps, and processor time of these and of the module's."""
    from transformers import StoppingCriteriaList

    clock, inner, module = Clock(), list[float](), served.module
    spans = module.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        made = spans(*args, **kwargs)
        inner.append(time.thread_time() - start)
        return made

    module.forward = timed
    served.generate(
        prompts, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),  # type: ignore[list-item]
    )  # fmt: skip
    module.forward = spans
    first, *others = steps(clock.wall)
    row["prefill"].append(first)
    row["step"].append(statistics.median(others))
    row["busy"].append(statistics.median(steps(clock.busy)[1:]))
    row["module"].append(statistics.median(inner[1:]))


def main() -> int:
    from _results import Results, parser_for

    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama", "gpt2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cluster", type=Path, help="a file of `tapas calibrate`, instead of measuring")
    chosen = parser.parse_args()
    out, load = Results(chosen.json), os.getloadavg()[0]
    with calibrated(chosen.cluster) as cluster:
        rows = on_ranks(rank, WORLD, chosen.models, cluster, chosen.rounds)
    shown, ratios = list[tuple[str, ...]](), list[float]()
    for row in rows:
        medians = {key: statistics.median(row[key][WARM_UP:]) for key in ("prefill", "step", "busy", "module")}
        (first, token), (compute, sent) = row["predicted"], row["parts"]
        ratios.append(medians["step"] / token)  # of tokens per second: predicted over measured
        around = medians["busy"] - medians["module"]
        seconds = compute, medians["module"], sent, around, token, medians["step"], first, medians["prefill"]
        rates = f"{BATCH / token:.0f}", f"{BATCH / medians['step']:.0f}", f"{ratios[-1]:.2f}"
        shown.append((row["model"], row["strategy"], *(f"{1e3 * s:.2f}" for s in seconds), *rates))
    columns = (
        "model", "plan", "computing", "the module", "sending", "generate", "a step", "measured", "prefill", "measured",
        "tokens/s", "measured", "ratio",
    )  # fmt: skip
    title = f"A decode step on {WORLD} gloo ranks, milliseconds, {chosen.rounds} rounds in turn"
    out.table("plans", title, columns, shown)
    out.console.print(f"{load:.1f} processes were at work on {os.cpu_count()} cores before")
    return int(not out.want("tokens per second are off by", max(abs(r - 1) for r in ratios), OFF))


if __name__ == "__main__":
    sys.exit(main())
