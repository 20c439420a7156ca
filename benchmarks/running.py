"""Step time of our plan beside DDP, FSDP2 and transformers' tp_plan, on two local ranks; overhead at one rank.

    python benchmarks/running.py [--models NAME ...] [--rounds N] [--cluster FILE] [--against SRC]

`--against` the `src` folder of another checkout measures, instead of all that, what `parallelize` and a step take with
either code: processor time of a rank of two, in processes that are started in turn.

All train the same small model (a Llama, a GPT-2 with dropout, a Mixtral, a BERT) on the same global batch over gloo,
in turn in the same processes, so that what else the machine does hits them alike; the ratio is the median over the
rounds of ours to the best of the others, with the 95 % interval of that median. The plan is made for the machine as
`tapas calibrate` finds it at the start. Exit code 1 if ours is slower than 1.02 times the best of the others, or
if the rewritten program at one rank takes more than 1.05 times the original model.
"""

import copy
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _calibrated import WORLD, calibrated
from torch import nn

BATCH, LENGTH, VOCABULARY = 8, 128, 4000
SLACK = 1.02  # what two medians of the same thing differ by here
OVERHEAD = 1.05
WARM_UP = 3  # rounds that do not count
_SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_hidden_layers": 4,
          "vocab_size": VOCABULARY}  # fmt: skip
_DECODER = {**_SIZES, "num_key_value_heads": 4, "use_cache": False}


def llama() -> nn.Module:
    import transformers as T

    return T.LlamaForCausalLM(T.LlamaConfig(**_DECODER))


def mixtral() -> nn.Module:
    import transformers as T

    sizes = {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 344}
    return T.MixtralForCausalLM(T.MixtralConfig(**sizes))


def gpt2() -> nn.Module:
    import transformers as T

    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return T.GPT2LMHeadModel(T.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    import transformers as T

    sizes = {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return T.BertForMaskedLM(T.BertConfig(**sizes, max_position_embeddings=LENGTH))


MODELS: dict[str, Callable[[], nn.Module]] = {f.__name__: f for f in (llama, gpt2, mixtral, bert)}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def tokens() -> dict[str, torch.Tensor]:
    x = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": x, "labels": x}


def mine(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of the batch."""
    each = BATCH // dist.get_world_size()
    return {k: v[dist.get_rank() * each : (dist.get_rank() + 1) * each] for k, v in inputs.items()}


def contenders(name: str, world: int, cluster: str) -> dict[str, tuple[nn.Module, dict[str, torch.Tensor]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import tapas

    inputs, mesh = tokens(), init_device_mesh("cpu", (world,))
    found: dict[str, tuple[nn.Module, dict[str, torch.Tensor]]] = {}
    found["tapas"] = tapas.parallelize(made(name), inputs, mesh=mesh, cluster=cluster), inputs
    unused = name == "mixtral"  # experts that got no token
    found["ddp"] = DistributedDataParallel(made(name), find_unused_parameters=unused), mine(inputs)
    sharded = made(name)
    for layer in next(m for m in sharded.modules() if isinstance(m, nn.ModuleList)):
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    found["fsdp2"] = fully_shard(sharded, mesh=mesh), mine(inputs)
    if getattr(made(name).config, "base_model_tp_plan", None):
        found["tp_plan"] = _tp_plan(name), inputs
    return found


def _tp_plan(name: str) -> nn.Module:
    """transformers applies its tp_plan when it loads a checkpoint."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:
        made(name).save_pretrained(folder[0])  # type: ignore[operator]
    dist.broadcast_object_list(folder, 0)
    return type(made(name)).from_pretrained(folder[0], tp_plan="auto", use_cache=False).train()  # type: ignore[attr-defined]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The fast one, which takes no mixture of DTensors and others (as tp_plan has them)."""
    import tapas

    if name == "tapas":
        return tapas.local_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)
    kinds = {type(p.data) for p in model.parameters()}
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=len(kinds) == 1 or None)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(**inputs)["loss"]
    loss.backward()
    optimizer.step()
    return time.perf_counter() - start, loss.item()


def rank(number: int, world: int, store: str, model_name: str, cluster: str, rounds: int, out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number)}
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=number, world_size=world)  # type: ignore[attr-defined]
    running = {}
    for name, (model, inputs) in contenders(model_name, world, cluster).items():
        running[name] = model, optimizer_of(name, model), inputs
    times: dict[str, list[float]] = {name: [] for name in running}
    losses: dict[str, list[float]] = {name: [] for name in running}
    for number_of_round in range(rounds):
        names = list(running)
        first = number_of_round % len(names)  # nobody is always the one after the largest
        for name in names[first:] + names[:first]:
            dist.barrier()
            seconds, loss = step(*running[name])
            times[name].append(seconds)
            losses[name].append(loss)
    for name in losses:  # ddp and fsdp know the loss of their part only
        total = torch.tensor(losses[name])
        dist.all_reduce(total)
        losses[name] = (total / world).tolist()
    if number == 0:
        Path(out).write_text(json.dumps({"times": times, "losses": losses}))
    dist.destroy_process_group()


def on_ranks(work: Callable[..., None], world: int, *given: Any) -> Any:
    """What `work(rank, world, store, *given, out)` writes to the file `out` as JSON, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out.json")
        context = multiprocessing.get_context("spawn")
        args = (world, str(Path(folder) / "store"), *given, out)
        ranks = [context.Process(target=work, args=(i, *args)) for i in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit("a rank failed")
        return json.loads(Path(out).read_text())


def alone(name: str, rounds: int) -> tuple[float, float, float]:
    """Forward and backward of the original and of the rewritten program at one rank, and how their losses differ."""
    from torch.distributed.device_mesh import init_device_mesh

    import tapas

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    inputs, model = tokens(), made(name)
    ours = tapas.parallelize(copy.deepcopy(model), inputs, mesh=init_device_mesh("cpu", (1,)))
    times: list[list[float]] = [[], []]
    values = [0.0, 0.0]
    for _ in range(rounds):
        for i, one in enumerate((model, ours)):
            one.zero_grad()
            start = time.perf_counter()
            loss = one(**inputs)["loss"]
            loss.backward()
            times[i].append(time.perf_counter() - start)
            values[i] = loss.item()
    dist.destroy_process_group()
    original, rewritten = (statistics.median(t[2:]) for t in times)
    return original, rewritten, abs(values[0] - values[1])


# -- one code against another ---------------------------------------------------------------------------

PROCESSES, STEPS, TIMES = 6, 40, 3


def measured(number: int, store: str, out: str) -> None:
    """Processor seconds of parallelize and of a step on one of two ranks, at their best."""
    from torch.distributed.device_mesh import init_device_mesh

    import tapas

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=number, world_size=2)  # type: ignore[attr-defined]
    inputs, mesh, making = tokens(), init_device_mesh("cpu", (2,)), []
    for _ in range(1 + TIMES):  # the first one imports
        model = made("llama")
        start = time.process_time()
        module = tapas.parallelize(model, inputs, mesh=mesh)
        making.append(time.process_time() - start)
    optimizer, steps = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True), []
    for _ in range(STEPS):
        start = time.process_time()
        step(module, optimizer, inputs)
        steps.append(time.process_time() - start)
    if number == 0:
        Path(out).write_text(json.dumps([min(making[1:]), min(steps[5:])]))
    dist.destroy_process_group()


def with_source(source: str) -> list[float]:
    """What `measured` finds with the code of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("store", "out.json")]
        environment = os.environ | {"PYTHONPATH": source}
        call = f"import runpy; runpy.run_path({__file__!r})['measured']({{}}, *{paths!r})"
        ranks = [subprocess.Popen([sys.executable, "-c", call.format(i)], env=environment) for i in range(2)]
        ended = [process.wait() for process in ranks]
        if any(ended):
            sys.exit(f"a rank failed with the code in {source}")
        return json.loads(Path(paths[1]).read_text())


def against(other: str, console: Any) -> int:
    here = str(Path(__file__).resolve().parents[1] / "src")
    found: dict[str, list[list[float]]] = {here: [], other: []}
    for number in range(PROCESSES):
        for source in (here, other) if number % 2 else (other, here):
            found[source].append(with_source(source))
    for place, (what, most) in enumerate((("parallelize", 1.1), ("a step", 1.01))):
        mine, theirs = ([1e3 * run[place] for run in found[source]] for source in (here, other))
        pairs = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        console.print(
            f"{what}: {statistics.median(mine):.1f} ms, there {statistics.median(theirs):.1f} ms;"
            f" median of the pairs' ratios {pairs:.3f}, of the best {min(mine) / min(theirs):.3f} (wanted {most})"
        )
    return 0


def compare(name: str, cluster: str, rounds: int, out: Any) -> bool:
    """A model's table; whether ours is as fast as it should be."""
    from _timing import interval

    found = on_ranks(rank, WORLD, name, cluster, rounds)
    times = {contender: seconds[WARM_UP:] for contender, seconds in found["times"].items()}
    medians = {contender: statistics.median(seconds) for contender, seconds in times.items()}
    best = min((c for c in medians if c != "tapas"), key=lambda c: medians[c])
    ratios = {c: interval([a / b for a, b in zip(times[c], times[best], strict=True)]) for c in medians}
    rows = []
    for contender, seconds in sorted(medians.items(), key=lambda item: item[1]):
        losses, (ratio, low, high) = found["losses"][contender], ratios[contender]
        cells = f"{1e3 * seconds:.1f}", f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        rows.append((contender, *cells, f"{losses[0]:.4f} to {losses[-1]:.4f}"))
    title = f"A step of a small {name} on two local ranks (gloo), {rounds - WARM_UP} rounds in turn"
    columns = ("", "milliseconds", f"against {best}, 95 % interval", "loss, first to last")
    out.table(name, title, columns, rows)
    original, rewritten, distance = alone(name, rounds)
    out.console.print(
        f"one rank, forward and backward: original {1e3 * original:.1f} ms, ours {1e3 * rewritten:.1f} ms;"
        f" losses differ by {distance:.1g}"
    )
    fast = out.want("ours / the best of the others", ratios["tapas"][0], SLACK)
    return out.want("one rank, ours / original", rewritten / original, OVERHEAD) and fast


def main() -> int:
    from _results import Results, parser_for

    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--cluster", type=Path, help="a file of `tapas calibrate`, instead of measuring")
    parser.add_argument("--against", metavar="SRC", help="the src folder of another checkout")
    given = parser.parse_args()
    out = Results(given.json)
    if given.against:
        return against(given.against, out.console)
    with calibrated(given.cluster) as cluster:
        met = [compare(name, cluster, WARM_UP + given.rounds, out) for name in given.models]
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
