"""Seconds of operators by family: what sizes, alignment and gradients make of them."""

from dataclasses import replace

import numpy as np
import pytest

from tapas.cost.kernels import work_of
from tapas.hardware.cluster import Device
from tapas.hardware.cluster_files import clusters, load_cluster
from tapas.hardware.efficiency import FAMILIES, Efficiency
from tapas.ir.graph import Ref, Tensor
from tapas.rules.base import Call, registered, rule_for
from tests.oracle.harness import build
from tests.oracle.test_rules import CASES

PEAK, BANDWIDTH = 1e12, 1e9
ONE = Efficiency(flops=0.5)


def device(**families: Efficiency) -> Device:
    return Device("toy", 10**9, BANDWIDTH, (("float32", PEAK), ("bfloat16", PEAK)), 1e-9, 0.5, tuple(families.items()))


def call(target: str, *shapes: tuple[int, ...], made: tuple[int, ...], trained: bool = True, **kwargs: object):
    tensors = tuple(Tensor(f"t{i}", shape, "bfloat16", trained) for i, shape in enumerate(shapes))
    refs = tuple(map(Ref, range(len(tensors))))
    return Call(target, refs, tuple(kwargs.items()), tensors, (Tensor("y", made, "bfloat16", trained),))


def seconds(one: Call, where: Device, sizes: dict[str, int] | None = None) -> tuple[float, float]:
    rule = rule_for(one)
    every = {f.name: f.size for f in rule.factors} | (sizes or {})
    held = [np.array([float(t.nbytes)]) for t in (*one.operands, *one.results)]
    forward, backward = work_of(one, rule, every, held).seconds(where)
    return float(forward[0]), float(backward[0])


def linear(rows: int, depth: int, columns: int, bias: bool = False) -> Call:
    shapes = [(rows, depth), (columns, depth), *([(columns,)] if bias else [])]
    return call("aten.linear.default", *shapes, made=(rows, columns))


def test_products_by_their_smallest_dim_and_alignment() -> None:
    family = Efficiency(flops=0.5, half_dim=128, even=0.5, odd=0.25)
    where = replace(device(matmul=family), memory_bytes_per_s=1e18)

    def share(one: Call) -> float:
        flops = 2 * one.operands[0].elements * one.operands[1].shape[0]
        return flops / PEAK / seconds(one, where)[0]

    assert share(linear(4096, 4096, 128)) == share(linear(4096, 128, 4096)) == pytest.approx(0.25)
    assert share(linear(128, 4096, 4096)) == pytest.approx(0.25)
    assert share(linear(1024, 1024, 1024)) == pytest.approx(0.5 * 1024 / (1024 + 128))
    assert share(linear(4096, 4096, 4100)) / share(linear(4096, 4096, 4096)) == pytest.approx(0.5)
    assert share(linear(4096, 4096, 4097)) / share(linear(4096, 4096, 4096)) == pytest.approx(0.25)
    assert share(linear(4097, 4096, 4096)) == pytest.approx(share(linear(4096, 4096, 4096)))  # rows may be odd


def test_backward_is_a_product_for_each_gradient_and_a_sum_for_a_bias() -> None:
    where = device(matmul=ONE, strided=Efficiency(forward=0.5))
    forward, backward = seconds(linear(512, 512, 512), where)
    assert backward == pytest.approx(2 * forward)
    ahead, back = seconds(linear(512, 512, 512, bias=True), where)
    assert back - 2 * ahead == pytest.approx(2 * 512 * 512 / (0.5 * BANDWIDTH), rel=1e-6)


def attention(length: int, size: int, **kwargs: object) -> Call:
    shape = (2, 4, length, size)
    return call("aten.scaled_dot_product_attention.default", shape, shape, shape, made=shape, **kwargs)


def test_attention_by_length_and_size_of_heads() -> None:
    family = Efficiency(flops=0.8, half_dim=64, half_length=512, back=2.5)
    where = replace(device(attention=family), memory_bytes_per_s=1e18)
    forward, backward = seconds(attention(512, 64), where)
    assert forward == pytest.approx(4 * 2 * 4 * 512 * 512 * 64 / (PEAK * 0.8 * 0.5 * 0.5))
    assert backward == pytest.approx(2.5 * forward)
    causal, _ = seconds(attention(1024, 64, is_causal=True), where)  # a query looks at half of the keys
    assert causal == pytest.approx(2 * forward)


def test_attention_with_a_trained_bias_is_not_fused() -> None:
    shape, scores = (2, 4, 64, 16), (1, 4, 64, 64)
    one = call("aten.scaled_dot_product_attention.default", shape, shape, shape, scores, made=shape)
    assert rule_for(one).kernels_of == "unfused_attention"
    given = replace(one, operands=(*one.operands[:3], one.operands[3].constant))
    assert rule_for(given).kernels_of == "attention"


def test_pointwise_in_two_classes() -> None:
    same = call("aten.mul.Tensor", (8, 64), (8, 64), made=(8, 64))
    wide = call("aten.mul.Tensor", (8, 64), (64,), made=(8, 64))
    cast = replace(same, results=(Tensor("y", (8, 64), "float32", True),))
    assert [rule_for(c).kernels_of for c in (same, wide, cast)] == ["pointwise", "strided", "strided"]
    assert rule_for(same).backward == 2 and rule_for(wide).backward == 3  # one gradient is added up besides
    where = device(pointwise=Efficiency(forward=0.5, backward=0.25))
    forward, backward = seconds(same, where)
    assert forward == pytest.approx(3 * 8 * 64 * 2 / (0.5 * BANDWIDTH)) and backward == pytest.approx(4 * forward)


def test_what_runs_nothing_takes_no_time() -> None:
    copy = call("aten.clone.default", (8, 64), made=(8, 64))
    assert seconds(copy, device())[0] > 0 and seconds(copy, device())[1] == 0
    assert seconds(call("aten.neg.default", (8, 64), made=(8, 64), trained=False), device())[1] == 0


def test_families_of_rules_are_known() -> None:
    assert {build(case).rule.kernels_of for case in CASES} <= set(FAMILIES)
    assert registered()
    for cluster in clusters().values():
        assert [name for name, _ in cluster.device.families] == list(FAMILIES)
        assert cluster.device.family("matmul").flops == cluster.device.efficiency


def test_measured_rates() -> None:
    """What was measured on an H200 comes out of its figures (see benchmarks/measured.py, too)."""
    h200 = load_cluster("h200-sxm").device

    def rate(one: Call) -> float:
        return 2e-12 * one.operands[0].elements * one.operands[1].shape[0] / seconds(one, h200)[0]

    assert 663 <= rate(linear(16384, 2048, 8192)) <= 841
    assert 94 <= rate(linear(4096, 768, 50257)) <= 145
    assert 200 <= rate(linear(16384, 1024, 30522)) <= 300
