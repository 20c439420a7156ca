"""Several NCCL ranks on one GPU: what is hidden behind kernels, of ours and of FSDP2, in one run.

    python benchmarks/gpu_overlap.py [--models llama bert] [--ranks 2 4] [--output FOLDER] [--device cpu --tiny]

Every rank has an NCCL_HOSTID of its own, so that real NCCL runs between processes that share a GPU: what overlaps is
real, how long transfers take is not. Ours has the pins `*=fsdp`; FSDP2 is `fully_shard` on every layer and on the
model, with its defaults. Both are trained in bfloat16; one step is profiled. *Sending* is the time in which an NCCL
kernel runs, *hidden* the part of it in which the stream of the computation is busy; what could be hidden is the
smaller one of sending and computing, in the forward pass and in the backward pass, between the first and the last
hundredth of what is computed: nothing comes before the first gather or after the last reduction. In float32 three
steps of both are compared with the original on one rank.
"""

import argparse
import copy
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
COPIES = ("CatArray", "split_with_sizes", "direct_copy", "Memcpy", "foreach_copy", "chunk_cat")
STEPS, WARM_UP = 3, 3
ENDS = 0.01  # of what is computed
FORWARD = "forward pass"


def llama(tiny: bool) -> tuple[Any, dict[str, Any], str]:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256} if tiny else {
        "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8192}  # fmt: skip
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, use_cache=False)  # fmt: skip
    return (
        transformers.LlamaForCausalLM(config),
        {"batch": 2 if tiny else 20, "length": 16 if tiny else 2048},
        ("model.layers"),
    )


def bert(tiny: bool) -> tuple[Any, dict[str, Any], str]:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256} if tiny else {
        "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8192}  # fmt: skip
    config = transformers.BertConfig(
        **sizes, num_hidden_layers=8, num_attention_heads=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)  # fmt: skip
    return (
        transformers.BertForMaskedLM(config),
        {"batch": 2 if tiny else 80, "length": 16 if tiny else 512},
        ("bert.encoder.layer"),
    )


MODELS = {"llama": llama, "bert": bert}


def ids(model: Any, rows: int, length: int, device: str) -> dict[str, torch.Tensor]:
    x = torch.randint(0, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": x.to(device), "labels": x.clone().to(device)}


def wrapped(kind: str, model: Any, inputs: dict[str, torch.Tensor], layers: str) -> Any:
    """The model as it is, as ours, or as that of FSDP2, with the inputs of a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = {k: v.chunk(world)[rank] for k, v in inputs.items()}
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.get_submodule(layers):
            fully_shard(layer)
        fully_shard(model)
        return model, part
    if kind == "ours":
        import tapas

        return tapas.parallelize(model, inputs, mesh=world, cluster="h200-sxm", pins={"*": "fsdp"}), inputs
    return model, inputs


def losses(kind: str, name: str, device: str, tiny: bool) -> list[float]:
    torch.manual_seed(0)
    model, _, layers = MODELS[name](True)
    inputs = ids(model, 8, 16, device)
    model, inputs = wrapped(kind, model.to(device), inputs, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(STEPS):
        loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if kind == "fsdp2":
            dist.all_reduce(value)
            value /= dist.get_world_size()
        found.append(float(value))
    return found


def profiled(kind: str, name: str, device: str, tiny: bool, trace: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, sizes, layers = MODELS[name](tiny)
    inputs = ids(model, sizes["batch"] * dist.get_world_size(), sizes["length"], device)
    model = model.to(device, torch.bfloat16).train()
    model, inputs = wrapped(kind, model, inputs, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        with torch.profiler.record_function(FORWARD):
            loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UP):
        step()
    kernels = kernels_of(step)
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else 0.0
    if trace:
        Path(trace).write_text(json.dumps([
            [e["name"][:80], e["args"].get("stream"), e["ts"], e["dur"]] for e in kernels]))  # fmt: skip
    return summary(kernels) | {"peak_mb": peak}


def kernels_of(step: Callable[[], object]) -> list[dict[str, Any]]:
    """What a device does in a step, and when it is in the forward pass, where the step says so."""
    on = torch.profiler.ProfilerActivity
    activities = [on.CPU, on.CUDA] if torch.cuda.is_available() else [on.CPU]
    dist.barrier()
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_bytes())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    said = ("gpu_user_annotation", FORWARD)
    return [e for e in events if e.get("cat") in kinds or (e.get("cat"), e.get("name")) == said]


def summary(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    from tapas.verify.intervals import common, length, union

    def when(event: dict[str, Any]) -> tuple[int, int]:
        return round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"]))

    forward = [e for e in kernels if e["name"] == FORWARD]
    kernels = [e for e in kernels if e["name"] != FORWARD]
    sent = [e for e in kernels if "nccl" in e["name"].lower()]
    rest = [e for e in kernels if "nccl" not in e["name"].lower() and "multi_tensor" not in e["name"]]
    by_stream = Counter[int]()
    for event in rest:
        by_stream[event["args"]["stream"]] += event["dur"]
    main = by_stream.most_common(1)[0][0] if by_stream else 0
    sending, busy = union(map(when, sent)), union(when(e) for e in rest if e["args"]["stream"] == main)
    copies = [e for e in rest if any(word in e["name"] for word in COPIES)]
    hidden = length(common(sending, busy))
    first, last = _after(busy, ENDS), _after(busy, 1 - ENDS)
    ends = [when(e)[1] for e in forward if e["args"].get("stream") == main]
    turn = max((end for end in ends if first < end < last), default=first)
    sent_and_computed = [(common(sending, [part]), common(busy, [part])) for part in ((first, turn), (turn, last))]
    could = sum(min(length(sent), length(computed)) for sent, computed in sent_and_computed)
    hidden_inside = sum(length(common(sent, computed)) for sent, computed in sent_and_computed)
    return {
        "collectives": len(sent), "sending_ms": length(sending) / 1e6, "computing_ms": length(busy) / 1e6,
        "hidden_ms": hidden / 1e6, "kinds": Counter(e["name"].split("(")[0] for e in sent),
        "hidden of what could be": hidden_inside / max(could, 1),
        "copies": len(copies), "copies_ms": sum(e["dur"] for e in copies) / 1e3,
        "kernels_ms": sum(e["dur"] for e in rest if e not in copies) / 1e3, "kernels": len(rest) - len(copies),
    }  # fmt: skip


def _after(busy: list[tuple[int, int]], share: float) -> int:
    """When so much of it is done."""
    left = share * sum(end - start for start, end in busy)
    for start, end in busy:
        if end - start >= left:
            return round(start + left)
        left -= end - start
    return busy[-1][1] if busy else 0


def join(number: int, world: int, folder: str, device: str) -> None:
    """Ranks that share a GPU, each as if on a host of its own."""
    warnings.simplefilter("ignore")
    os.environ.update({"MASTER_ADDR": "127.0.0.1"})
    if device == "cuda":
        os.environ.update(APART | {"NCCL_HOSTID": f"rank{number}"})
        torch.cuda.set_device(number % torch.cuda.device_count())
    store = dist.FileStore(f"{folder}/store{world}", world)  # type: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=number, world_size=world)


def rank_main(number: int, world: int, folder: str, chosen: Any) -> None:
    join(number, world, folder, chosen.device)
    found: dict[str, Any] = {}
    for name in chosen.models:
        for kind in ("original", "ours", "fsdp2"):
            row: dict[str, Any] = {}
            try:
                row["losses"] = losses(kind, name, chosen.device, chosen.tiny)
                if kind != "original":
                    trace = f"{chosen.output}/{name}-{world}-{kind}.json" if chosen.output and not number else ""
                    row |= profiled(kind, name, chosen.device, chosen.tiny, trace)
            except RuntimeError as error:
                row["error"] = str(error)
            found[f"{name} {kind}"] = row
            if chosen.device == "cuda":
                torch.cuda.empty_cache()
    Path(folder, f"rank{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", default="")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    table = Table(title="Ranks that share one GPU: one step of the first rank, milliseconds")
    columns = (
        "losses",
        "collectives",
        "sending",
        "computing",
        "hidden",
        "of what could be",
        "copies",
        "ms",
        "kernels",
        "ms",
        "MB",
    )
    for heading in ("", *columns):
        table.add_column(heading)
    for world in chosen.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(rank_main, (world, folder, copy.copy(chosen)), nprocs=world)
            found = json.loads(Path(folder, "rank0.json").read_text())
        for name, row in found.items():
            print(world, name, json.dumps(row), flush=True)
            far = max(
                abs(a - b) for a, b in zip(row["losses"], found[f"{name.split()[0]} original"]["losses"], strict=True)
            )
            if "sending_ms" in row:
                table.add_row(
                    f"{name}, {world}", f"{far:.1e}", f"{row['collectives']}", f"{row['sending_ms']:.1f}",
                    f"{row['computing_ms']:.1f}", f"{row['hidden_ms']:.1f}", f"{row['hidden of what could be']:.0%}",
                    f"{row['copies']}", f"{row['copies_ms']:.1f}", f"{row['kernels']}", f"{row['kernels_ms']:.1f}",
                    f"{row['peak_mb']:.0f}")  # fmt: skip
    Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
