"""Train a small GPT on the characters of a text, on one device or on many, with the same loss curve.

    python examples/train_gpt.py                                              one process, the plain model
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh 2x2              four ranks, the best plan
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh 4 --resume DIR   go on from a checkpoint, on any mesh

On several hosts, start the same on each of them (here two with eight devices each; HOST is the first one):

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/train_gpt.py --mesh 2x8 --cluster h100-sxm
"""

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tapas

# The norm of all gradients is summed over one axis after the other, which torch would rather not do: it is a number.
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
TEXT = Path(__file__).parent.parent / "LICENSE"  # a text that ships with the repository


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self, symbols: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


class Text:
    """Batches of a text; which ones depends on the number of the step only."""

    def __init__(self, path: Path, batch: int, length: int) -> None:
        text = path.read_text(encoding="utf-8")
        self.symbols = sorted(set(text))
        self.data = torch.tensor([self.symbols.index(c) for c in text])
        self.batch, self.length = batch, length

    def __call__(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.data) - self.length, (self.batch,), generator=generator)
        windows = torch.stack([self.data[i : i + self.length + 1] for i in starts.tolist()])
        return {"x": windows[:, :-1], "y": windows[:, 1:]}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="a UTF-8 file to learn from")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="of all ranks together")
    parser.add_argument("--length", type=int, default=64, help="characters in a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--mesh", help="such as 4 or 2x2; the number of ranks if not given")
    parser.add_argument("--cluster", help="what to plan for; this machine's kind if not given")
    parser.add_argument("--pin", action="append", default=[], metavar="PATTERN=WHAT", help="as in `tapas plan`")
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="write a checkpoint there at the end, and every --every"
    )
    parser.add_argument("--every", type=int, default=0, metavar="N", help="steps")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from this checkpoint")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write the losses there, as JSON")
    return parser.parse_args(arguments)


def parallel(model: nn.Module, inputs: dict[str, torch.Tensor], chosen: argparse.Namespace) -> nn.Module:
    """The model for this rank: the one call that makes a difference between one device and many."""
    return tapas.parallelize(
        model, inputs,
        mesh=chosen.mesh or str(dist.get_world_size()),
        cluster=chosen.cluster or ("h100-sxm" if torch.cuda.is_available() else "cpu-gloo"),
        pins=chosen.pin,
    )  # fmt: skip


def train(chosen: argparse.Namespace, report: Callable[[int, float], None] = lambda step, loss: None) -> list[float]:
    """The loss of each step."""
    text = Text(chosen.text, chosen.batch, chosen.length)
    torch.manual_seed(0)  # all ranks start from the same weights
    model = GPT(len(text.symbols), chosen.length, chosen.width, chosen.layers, chosen.heads)
    model = model.to(getattr(torch, chosen.dtype))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = parallel(model, text(0), chosen) if dist.is_initialized() else model.to(device)
    optimizer = tapas.local_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)  # on this rank's parts
    first = tapas.load_checkpoint(chosen.resume, model, optimizer)["step"] if chosen.resume else 0
    losses = []
    for step in range(first, chosen.steps):
        inputs = {name: value.to(device) for name, value in text(step).items()}
        loss = model(**inputs)["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        report(step, losses[-1])
        done = step + 1
        if chosen.save and (done == chosen.steps or (chosen.every and done % chosen.every == 0)):
            tapas.save_checkpoint(chosen.save, model, optimizer, extra={"step": done})
    return losses


@contextmanager
def progress(steps: int, ranks: int) -> Iterator[Callable[[int, float], None]]:
    """A bar in a terminal, a line now and then in a file."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    said = "1 process" if ranks == 1 else f"{ranks} ranks"
    if not console.is_terminal:
        yield lambda step, loss: print(f"{said}: step {step + 1:4d}  loss {loss:.4f}") if step % 20 == 19 else None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(said, total=steps)

        def report(step: int, loss: float) -> None:
            bar.update(task, completed=step + 1, description=f"{said}: loss {loss:.4f}")

        yield report


def main() -> None:
    chosen = options()
    many = "RANK" in os.environ  # set by torchrun
    if many:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    first = not many or dist.get_rank() == 0
    ranks = dist.get_world_size() if many else 1
    if first:
        with progress(chosen.steps, ranks) as report:
            losses = train(chosen, report)
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps" if losses else "nothing left to do")
        if chosen.losses:
            chosen.losses.write_text(json.dumps(losses))
    else:
        train(chosen)
    if many:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except tapas.TapasError as error:
        raise SystemExit(f"error: {error}") from None
