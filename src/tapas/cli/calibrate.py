"""`tapas calibrate`: what the device at hand reaches, as a cluster file."""

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from tapas.cli import options as given
from tapas.cli.app import emit, guarded, progress
from tapas.errors import TapasError

_FILE = "Write the cluster to this file, for --cluster."
File = Annotated[Path, Option("--output", "-o", metavar="FILE", help=_FILE, show_default=False)]
Dtype = Annotated[str, Option(help="Of operators: float32, bfloat16 or float16. By default bfloat16 on GPUs.")]
OnDevice = Annotated[str, Option("--device", help="cpu or cuda; by default cuda where there is one.")]
Like = Annotated[str, Option(help="The preset whose figures stay where nothing was measured.")]
Rounds = Annotated[int, Option(min=3, help="How often each figure is measured.")]
Force = Annotated[bool, Option("--force", help="Write down what was measured on a busy machine, too.")]

PROBES = 45  # about: for the progress bar
DTYPES = ("float32", "bfloat16", "float16")
LIKE = {"cpu": "cpu-gloo", "cuda": "h200-sxm"}


@guarded
def calibrate(
    *, output: File, device: OnDevice = "", dtype: Dtype = "", like: Like = "", rounds: Rounds = 7,
    plot: given.Plot = None, force: Force = False, as_json: given.Json = False,
) -> None:  # fmt: skip
    """Measure what the device at hand reaches, for all families of operators, and write it as a cluster file.

    Under torchrun all ranks measure at once, and collectives within a node and between nodes as well:

        torchrun --nproc-per-node 8 -m tapas.cli calibrate -o mine.toml

    With --plot the figures are drawn against what the cost model makes of them."""
    import torch

    from tapas.calibrate.profile import check, measure
    from tapas.calibrate.ranks import ranks
    from tapas.hardware.cluster_files import load_cluster
    from tapas.hardware.cluster_toml import toml_text
    from tapas.report.calibrate import calibration_dict, calibration_page, draw_calibration
    from tapas.report.pictures import check_plot
    from tapas.util import check_target, silent, write_file

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in LIKE or (kind == "cuda" and not torch.cuda.is_available()):
        raise TapasError(f"--device {kind}", "there is none here", "give cpu, or cuda on a machine with GPUs")
    dtype = dtype or ("bfloat16" if kind == "cuda" else "float32")
    if dtype not in DTYPES:
        raise TapasError(f"--dtype {dtype}", "is not measured", f"give one of {', '.join(DTYPES)}")
    load_cluster(like or LIKE[kind])
    check_target(output)
    if output.suffix.lower() != ".toml":
        raise TapasError(f"--output {output}", "a cluster is written as TOML", "end its name in .toml")
    if plot is not None:
        check_plot(plot)
    here = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(here)
    with ranks(here) as all_ranks, progress(PROBES) as step:
        shown = step if all_ranks.number == 0 else silent
        found = measure(all_ranks, here, dtype, output.stem, like or LIKE[kind], rounds, shown)
    if all_ranks.number:
        return
    check(found, force)
    write_file(output, toml_text(found.cluster).encode())
    if plot is not None:
        draw_calibration(found, plot)
    emit(lambda: calibration_page(found), lambda: calibration_dict(found), as_json)
    typer.echo(f"\nCluster written to {output}: tapas plan MODEL --cluster {output}", err=as_json)
