"""Two NCCL ranks on one GPU: a ring of keys, experts with their tokens sent, and decode steps, beside one rank.

    python benchmarks/gpu_splits.py [--ranks 2] [--cases ring ...] [--device cpu --tiny]

Every rank has an NCCL_HOSTID of its own (see gpu_overlap.py): numbers and what overlaps are real, how long transfers
take is not. Losses of three steps and the norm of the last gradients are compared with those of the original on one
rank, in float32 and bfloat16, and tokens that are generated. Of a ring a step is profiled: how much of its transfers
runs beside kernels.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_overlap import join, kernels_of, summary
from rich.console import Console
from rich.table import Table

import tapas

STEPS = 3
LLAMA: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
}  # fmt: skip
TINY: dict[str, Any] = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def llama(sizes: dict[str, Any]) -> Any:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))


def mixtral(sizes: dict[str, Any]) -> Any:
    import transformers

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_key_value_heads=2, **experts))


MODELS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, str], int]] = {
    "ring": (llama, {"*.self_attn": "[ring]"}, 4096), "dispatch": (mixtral, {"*.experts": "dispatch"}, 512),
}  # fmt: skip
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trained(model: Any, inputs: dict[str, torch.Tensor]) -> list[float]:
    """Losses, and the norm of all gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, norm = [], 0.0
    for _ in range(STEPS):
        loss = model(**inputs)["loss"]
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return [*found, norm]


def compared(case: str, precision: str, device: str, tiny: bool) -> dict[str, Any]:
    make, pins, length = MODELS[case]
    torch.manual_seed(0)
    model = make(TINY if tiny else LLAMA).to(device, PRECISIONS[precision]).train()
    x = torch.randint(0, 512, (2, 64 if tiny else length), generator=torch.Generator().manual_seed(1)).to(device)
    inputs = {"input_ids": x, "labels": x.clone()}
    ours = tapas.parallelize(copy.deepcopy(model), inputs, mesh=dist.get_world_size(), cluster="h200-sxm", pins=pins)
    row: dict[str, Any] = {"ours": trained(ours, inputs), "one": trained(model, inputs)}
    if case == "ring" and device == "cuda":
        row |= summary(kernels_of(lambda: ours(**inputs)["loss"].backward()))
    return row


def generated(device: str, tiny: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = llama(TINY if tiny else LLAMA).to(device).eval()
    asked: dict[str, Any] = {"pins": {"*": "megatron"}, "batch": 2, "prompt": 16, "new": 32}
    served = tapas.serve(copy.deepcopy(model), mesh=dist.get_world_size(), cluster="h200-sxm", **asked)
    prompts = torch.randint(3, 512, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 32, "pad_token_id": 0, "do_sample": False}
    ours, one = (m.generate(prompts, **options) for m in (served, model))
    return {"ours": ours.tolist(), "one": one.tolist(), "alike": float((ours == one).float().mean())}


def rank_main(number: int, world: int, folder: str, chosen: Any) -> None:
    join(number, world, folder, chosen.device)
    found: dict[str, Any] = {}
    for case in chosen.cases:
        for precision in PRECISIONS if case in MODELS else ("float32",):
            try:
                row = compared(case, precision, chosen.device, chosen.tiny) if case in MODELS else (
                    generated(chosen.device, chosen.tiny))  # fmt: skip
            except RuntimeError as error:
                row = {"error": str(error)}
            found[f"{case}, {precision}"] = row
            Path(folder, f"rank{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*MODELS, "decode"], default=[*MODELS, "decode"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    table = Table(title=f"{chosen.ranks} ranks that share one GPU, beside one rank")
    for heading in ("", "furthest loss", "norm of gradients", "tokens alike", "sending ms", "beside kernels"):
        table.add_column(heading)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (chosen.ranks, folder, chosen), nprocs=chosen.ranks)
        found = json.loads(Path(folder, "rank0.json").read_text())
    for name, row in found.items():
        print(name, json.dumps(row), flush=True)
        if "alike" in row:
            table.add_row(name, "", "", f"{row['alike']:.0%}", "", "")
        elif "ours" in row:
            far = [abs(a - b) / abs(b) for a, b in zip(row["ours"], row["one"], strict=True)]
            sent = (f"{row['sending_ms']:.1f}", f"{row['hidden_ms']:.1f}") if "sending_ms" in row else ("", "")
            table.add_row(name, f"{max(far[:-1]):.1e}", f"{far[-1]:.1e}", "", *sent)
        else:
            table.add_row(name, row["error"][:60])
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
