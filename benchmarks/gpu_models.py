"""One rank of the parallel program against the original, on a GPU, for models of many kinds.

    python benchmarks/gpu_models.py [--models NAME ...] [--rounds N] [--compile] [--device cpu --tiny]

Each model is trained in bfloat16, the original and ours in turn: forward and backward, and the whole step with fused
AdamW (ours by `tapas.local_optimizer`). A ratio is the median over the rounds, with the 95 % interval of that median.
`--tiny` is for trying this file out where there is no GPU: its ratios are those of overheads, not of models.
Wanted: at most 1.02 forward and backward, 1.03 with the optimizer, 1.02 compiled.
"""

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _timing import interval
from rich.console import Console
from rich.table import Table

import tapas

WARM_UP = 3
Config = dict[str, Any]
_LLAMA: Config = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
                  "num_key_value_heads": 4, "vocab_size": 32000, "use_cache": False}  # fmt: skip
_TINY: Config = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "n_layer": 2, "n_embd": 64, "n_head": 4, "num_layers": 2,
    "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4,
}  # fmt: skip


def text(model: str, batch: int, length: int, **config: Any) -> Callable[[bool], tuple[Any, Config]]:
    def made(tiny: bool) -> tuple[Any, Config]:
        import transformers as T

        sizes = config | {key: value for key, value in _TINY.items() if key in config} if tiny else config
        rows, columns = (2, 16) if tiny else (batch, length)
        built = getattr(T, model)(getattr(T, model).config_class(**sizes))
        x = torch.randint(0, sizes["vocab_size"], (rows, columns), generator=torch.Generator().manual_seed(1))
        return built, {"input_ids": x, "labels": x.clone()}

    return made


def images(model: str, batch: int, **config: Any) -> Callable[[bool], tuple[Any, Config]]:
    def made(tiny: bool) -> tuple[Any, Config]:
        import transformers as T

        small = _TINY | {"image_size": 32, "depths": [1, 1], "num_heads": [2, 2], "hidden_sizes": [16, 32],
                         "embed_dim": 16, "window_size": 4, "patch_size": 4}  # fmt: skip
        sizes = config | {key: value for key, value in small.items() if key in config} if tiny else config
        built = getattr(T, model)(getattr(T, model).config_class(num_labels=10, **sizes))
        rows, side = (2, 32) if tiny else (batch, 224)
        pixels = torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(1))
        return built, {"pixel_values": pixels, "labels": torch.arange(rows) % 10}

    return made


_GPT2: Config = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "use_cache": False}
_QUIET: Config = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT: Config = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
MODELS: dict[str, Callable[[bool], tuple[Any, Config]]] = {
    "llama-1.1b": text("LlamaForCausalLM", 8, 2048, **_LLAMA),
    "llama-1.5b-8k": text("LlamaForCausalLM", 1, 8192, **_LLAMA | {
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8, "vocab_size": 128256}),
    "llama-8b-4-layers": text("LlamaForCausalLM", 4, 2048, **_LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_key_value_heads": 8}),
    "gpt2-xl-24-layers": text("GPT2LMHeadModel", 8, 1024, **_GPT2 | {"n_layer": 24, "n_embd": 1600, "n_head": 25}),
    "bert-large": text("BertForMaskedLM", 32, 512, **_BERT, vocab_size=30522),
    "t5-large-12-layers": text("T5ForConditionalGeneration", 16, 512, num_layers=12, d_model=1024, d_ff=4096, d_kv=64,
                               num_heads=16, vocab_size=32128, use_cache=False, decoder_start_token_id=0),
    "vit-h-16-layers": images("ViTForImageClassification", 64, hidden_size=1280, intermediate_size=5120,
                              num_hidden_layers=16, num_attention_heads=16, image_size=224, patch_size=14),
    "mixtral-small": text("MixtralForCausalLM", 8, 2048, **_LLAMA | {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 8}),
    "wide-resnet": images("ResNetForImageClassification", 64, embedding_size=64, depths=[3, 4, 6, 3],
                          hidden_sizes=[512, 1024, 2048, 4096]),
    "resnet-50": images("ResNetForImageClassification", 64, embedding_size=64, depths=[3, 4, 6, 3],
                        hidden_sizes=[256, 512, 1024, 2048]),
    "swin-t": images("SwinForImageClassification", 64, image_size=224, embed_dim=96, window_size=7,
                     depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24]),
    "gpt2": text("GPT2LMHeadModel", 4, 1024, **_GPT2, **_QUIET),
    "gpt2-dropout": text("GPT2LMHeadModel", 4, 1024, **_GPT2),
    "gpt2-1x128": text("GPT2LMHeadModel", 1, 128, **_GPT2, **_QUIET),
}  # fmt: skip


class Training:
    def __init__(self, model: Any, inputs: Config, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.inputs, self.optimizer = model, inputs, optimizer
        self.cuda = next(iter(inputs.values())).is_cuda
        self.program: list[float] = []
        self.step: list[float] = []
        self.loss = 0.0

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        start = self.now()
        loss = self.model(**self.inputs)["loss"]
        loss.backward()
        self.program.append(self.now() - start)
        self.optimizer.step()
        self.step.append(self.now() - start)
        self.loss = float(loss.detach())


def measured(name: str, device: torch.device, tiny: bool, rounds: int, compiled: bool) -> tuple[str, ...]:
    torch.manual_seed(0)
    model, inputs = MODELS[name](tiny)
    model = model.to(device, torch.bfloat16).train()
    inputs = {k: v.to(device, torch.bfloat16 if v.is_floating_point() else None) for k, v in inputs.items()}
    ours = tapas.parallelize(copy.deepcopy(model), inputs, mesh="1", cluster="h200-sxm")
    optimizers = (
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        tapas.local_optimizer(torch.optim.AdamW, ours.parameters(), lr=1e-4, fused=True),
    )
    both = [torch.compile(m) if compiled else m for m in (model, ours)]
    original, rewritten = (Training(m, inputs, o) for m, o in zip(both, optimizers, strict=True))
    for number in range(WARM_UP + rounds):
        for one in (original, rewritten) if number % 2 else (rewritten, original):
            one()
    cells = []
    for theirs, mine in ((original.program, rewritten.program), (original.step, rewritten.step)):
        theirs, mine = theirs[WARM_UP:], mine[WARM_UP:]
        ratio, low, high = interval([a / b for a, b in zip(mine, theirs, strict=True)])
        cells += [f"{1e3 * sorted(theirs)[len(theirs) // 2]:.2f}", f"{ratio:.3f} ({low:.3f} to {high:.3f})"]
    return name, *cells, f"{original.loss:.3f}, {rewritten.loss:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    warnings.simplefilter("ignore")
    console, device = Console(width=120), torch.device(chosen.device)
    backend = "nccl" if chosen.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    table = Table(title=f"One rank against the original{', compiled' if chosen.compile else ''}")
    for heading in ("", "forward and backward, ms", "ours", "whole step, ms", "ours", "loss of both"):
        table.add_column(heading)
    for name in chosen.models:
        try:
            row = measured(name, device, chosen.tiny, chosen.rounds, chosen.compile)
        except torch.OutOfMemoryError:
            row = (name, "does not fit")
        table.add_row(*row)
        print(*row, flush=True)  # a run that is cut off has said what it knew
        if chosen.device == "cuda":
            torch.cuda.empty_cache()
    console.print(table)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
