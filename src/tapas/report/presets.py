"""The models and clusters known by name."""

from collections.abc import Iterable
from typing import Any

from rich.console import Group

from tapas.hardware.cluster import Cluster
from tapas.models.catalog import Preset
from tapas.report import units
from tapas.report.frame import line, page, table


def models_page(presets: Iterable[Preset]) -> Group:
    rows = [
        (p.name, units.count(p.parameters), f"{p.batch}" + (f" × {p.seq}" if p.seq else ""), p.source, p.description)
        for p in presets
    ]
    columns = ("!model", ">parameters", "!batch × seq", "!from", "")
    return page(
        (
            table("Models known by name; nothing is downloaded", columns, rows),
            line("Also: hf:<model_type> for any architecture of transformers, a config.json, or file.py:function"),
        )
    )


def model_dict(preset: Preset) -> dict[str, Any]:
    return {
        "name": preset.name, "description": preset.description, "parameters": preset.parameters,
        "source": preset.source, "batch": preset.batch, "seq": preset.seq, "fields": preset.fields,
    }  # fmt: skip


def clusters_page(clusters: Iterable[Cluster]) -> Group:
    known = list(clusters)

    def rate(c: Cluster) -> str:
        peak = max(dict(c.device.flops_per_s).values()) / 1e12
        return f"{peak:.0f}" if peak >= 100 else f"{peak:.3g}"

    rows = [
        (c.name, c.device.name, units.nbytes(c.device.memory_bytes), f"{c.device.memory_bytes_per_s / 1e9:.0f} GB/s",
         rate(c), str(c.per_node), f"{c.intra.bytes_per_s / 1e9:.0f} GB/s", f"{c.inter.bytes_per_s / 1e9:.1f} GB/s")
        for c in known
    ]  # fmt: skip
    columns = ("!cluster", "device", ">memory", ">bandwidth", ">TFLOPS", ">per node", ">in node", ">between nodes")
    return page(
        (
            table("Clusters known by name (links: what collectives reach, one direction)", columns, rows),
            *(line((c.name, "bold"), f": {c.source}") for c in known),
            line("Your own: --cluster file.toml with the same figures"),
        )
    )
