"""One device and its links, measured: all families of operators, all collectives, and how they get along."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tapas.calibrate.fit import FREE, Fit, Sample, fit_family, quality, with_family
from tapas.calibrate.launches import operator_seconds
from tapas.calibrate.links import MeasuredLink, measure_link, measure_overlap
from tapas.calibrate.probes import CPU, GPU, Probe, Sizes, probes
from tapas.calibrate.ranks import Ranks
from tapas.calibrate.timing import Stopwatch, both_passes
from tapas.cost.memory import Optimizer
from tapas.errors import TapasError
from tapas.hardware.cluster import Cluster, Device
from tapas.hardware.cluster_files import DTYPES, load_cluster
from tapas.util import Progress

NOISY = 0.15  # a product that takes so much longer at one time than at another: figures would mean nothing
PASSING = ("pointwise", "strided", "norm", "softmax")  # what reads all of its operands once
CHAIN = 100  # of the shortest kernels
ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}  # of an optimizer's weight


@dataclass(frozen=True)
class Profile:
    cluster: Cluster
    samples: tuple[Sample, ...]
    fits: tuple[Fit, ...]
    links: dict[str, MeasuredLink]
    unmeasured: tuple[str, ...]  # families that could not be, with the reason
    spread: float  # of one and the same product over the time that all of this took

    @property
    def noisy(self) -> bool:
        return self.spread > NOISY


def measure(
    ranks: Ranks, device: torch.device, dtype: str, name: str, like: str, rounds: int, progress: Progress,
    sizes: Sizes | None = None,
) -> Profile:  # fmt: skip
    watch = Stopwatch(device, rounds, lambda value: ranks.mean([value])[0])
    bench = _Bench(ranks, watch, dtype, sizes or (GPU if device.type == "cuda" else CPU), progress)
    known = load_cluster(like)
    bench.reference()
    samples, unmeasured = bench.samples()
    bench.reference()
    found = bench.device(known.device, samples)
    links, overlap = bench.links(known.overlap)
    bench.reference()
    spread = max(bench.references) / min(bench.references) - 1
    fits = [
        quality(found, family, [s for s in samples if s.family == family])
        for family in dict.fromkeys(s.family for s in samples)
    ]
    inner, outer = (links[key].curved if key in links else None for key in ("intra", "inter"))
    said = "links measured" if links else f"links are those of {like}, not measured"
    per_node = ranks.per_node if ranks.world > 1 else known.per_node
    source = f"Measured by tapas calibrate with {dtype} on {ranks.world} rank(s), torch {torch.__version__}; {said}."
    cluster = Cluster(
        name, found, per_node, inner or known.intra, outer or (known.inter if inner is None else inner), source, overlap
    )
    return Profile(cluster, tuple(samples), tuple(fits), links, tuple(unmeasured), spread)


class _Bench:
    """Measures one thing after the other, on all ranks at once."""

    def __init__(self, ranks: Ranks, watch: Stopwatch, dtype: str, sizes: Sizes, progress: Progress) -> None:
        self.ranks, self.watch, self.sizes, self.progress = ranks, watch, sizes, progress
        self.type: torch.dtype = getattr(torch, dtype)
        self.dtype = dtype
        self.references: list[float] = []

    def reference(self) -> None:
        x = torch.randn(self.sizes.rows, self.sizes.rows, device=self.watch.device).to(self.type)
        self.ranks.together()
        self.references += self.ranks.mean([self.watch(lambda: x @ x)])

    def samples(self) -> tuple[list[Sample], list[str]]:
        found: list[Sample] = []
        unmeasured: dict[str, str] = {}
        for probe in probes(self.sizes):
            self.progress(probe.title)
            try:
                found.append(self.sample(probe))
            except (RuntimeError, NotImplementedError) as error:  # no kernel for this dtype here
                unmeasured[probe.family] = f"{probe.family} ({str(error).splitlines()[0]})"
        measured = {sample.family for sample in found}
        return found, [text for family, text in unmeasured.items() if family not in measured]

    def sample(self, probe: Probe) -> Sample:
        module = probe.module(self.type, self.watch.device)
        work = probe.work(module)
        self.ranks.together()
        ahead, back = both_passes(module, self.watch)
        forward, backward = self.ranks.mean([ahead, back])
        return Sample(probe.family, probe.title, work, forward, backward, probe.narrow)

    def device(self, known: Device, samples: list[Sample]) -> Device:
        """Peaks are the best that was seen; families are fitted to their samples one by one."""
        self.progress("fit")
        grouped = defaultdict[str, list[Sample]](list)
        for sample in samples:
            grouped[sample.family].append(sample)
        peaks = {dtype: peak for dtype in DTYPES if (peak := self.peak(dtype))}
        peaks[self.dtype] = max(s.flops_per_s for s in samples if s.family in FREE)
        peaks.setdefault("float32", peaks[self.dtype])
        bandwidth = max(s.bytes_per_s for s in samples if s.family in PASSING)
        found = replace(
            known, name=_device_name(self.watch.device), memory_bytes=self.memory_bytes(), efficiency=1.0,
            memory_bytes_per_s=bandwidth, flops_per_s=tuple(peaks.items()), launch_seconds=self.launch_seconds(),
        )  # fmt: skip
        for family, some in grouped.items():
            found = fit_family(found, family, some)
        for family, dtype in (("optimizer", torch.float32), ("narrow_optimizer", torch.bfloat16)):
            reached = min(self.optimizer_bytes_per_s(dtype) / bandwidth, 1.0)
            found = with_family(found, family, replace(found.family(family), forward=reached))
        return found

    def peak(self, dtype: str) -> float:
        n = max(self.sizes.widths)
        try:
            x = torch.randn(n, n, device=self.watch.device).to(getattr(torch, dtype))  # ones are multiplied faster
            (seconds,) = self.ranks.mean([self.watch(lambda: x @ x)])
        except RuntimeError:
            return 0.0
        return 2.0 * n**3 / seconds

    def launch_seconds(self) -> float:
        """The shortest kernel, without the host; or, where that is the device, an operator that has nothing to do."""
        if self.watch.device.type == "cpu":
            return self.ranks.mean([operator_seconds(self.watch)])[0]
        x = torch.ones(64, device=self.watch.device)
        graph = torch.cuda.CUDAGraph()
        x.add_(1.0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(CHAIN):
                x.add_(1.0)
        return self.ranks.mean([self.watch(graph.replay) / CHAIN])[0]

    def optimizer_bytes_per_s(self, dtype: torch.dtype) -> float:
        """By the bytes that the cost model counts for Adam."""
        n = ELEMENTS[self.watch.device.type]
        weight = torch.nn.Parameter(torch.ones(n, dtype=dtype, device=self.watch.device))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        (seconds,) = self.ranks.mean([self.watch(optimizer.step)])
        item = weight.element_size()
        return n * (3 * item + 2 * Optimizer("adam", master=False).state_bytes(item)) / seconds

    def memory_bytes(self) -> int:
        if self.watch.device.type == "cuda":
            return torch.cuda.get_device_properties(self.watch.device).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.ranks.per_node

    def links(self, overlap: float) -> tuple[dict[str, MeasuredLink], float]:
        """And how they get along with computing; `overlap` if there are none."""
        groups: dict[str, Any] = {"intra": self.ranks.inner, "inter": self.ranks.outer}
        names = {"intra": "within a node", "inter": "between nodes"}
        found = {
            key: measure_link(group, self.ranks, self.watch, self.progress, names[key])
            for key, group in groups.items()
            if group is not None
        }
        if not found:
            return found, overlap
        self.progress("computing while sending")
        key = min(found)  # between nodes if there are several
        return found, measure_overlap(groups[key], self.ranks, self.watch)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s) a rank"


def check(profile: Profile, force: bool) -> None:
    busy = next(_signs_of_a_busy_machine(profile), None)
    if busy is not None and not force:
        raise TapasError(
            "tapas calibrate",
            f"{busy}: the machine is busy",
            "wait until nothing else runs on it, or write down what was measured with --force",
        )


def _signs_of_a_busy_machine(profile: Profile) -> Iterator[str]:
    if profile.noisy:
        yield f"the same product took {profile.spread:.0%} longer at one time than at another"
    for link in profile.links.values():
        if link.disorder is not None:
            small, large = link.disorder
            yield (
                f"{small.kind} took {small.seconds * 1e3:.3g} ms for {small.nbytes:,} bytes"
                f" and {large.seconds * 1e3:.3g} ms for {large.nbytes:,}"
            )
