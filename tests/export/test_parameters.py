"""Files of parameters: what they say is what each rank of the plan holds."""

import json
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import tapas
from tapas._torch import strided_shard
from tapas.errors import PlanError
from tapas.export.parameters import stored_parameters
from tapas.runtime.parts import placement
from tapas.sharding.layout import local_pieces
from tests.distributed.small import EAGER, small


@cache
def plan_of(family: str, mesh: tuple[int, ...], strategy: str = "") -> tapas.Plan:
    model, inputs = small(family)
    pins = {"*": strategy} if strategy else None
    return tapas.plan(model, inputs, mesh=mesh, cluster=EAGER, pins=pins, baselines=False)


def _strided(dim: int, split_factor: int) -> Any:
    return strided_shard(dim, split_factor)


def test_dtensor_has_every_parameter_as_the_runtime_places_it() -> None:
    model, _ = small("packed")
    plan = plan_of("packed", (2, 2), "megatron")
    data = json.loads(tapas.export(plan, "dtensor").text)
    assert data["mesh"] == {"names": ["x", "y"], "sizes": [2, 2]}
    names = {
        "Shard": Shard,
        "Replicate": Replicate,
        "_StridedShard": lambda dim, split_factor: strided_shard(dim, split_factor),
    }
    stored = {p.name: p for p in stored_parameters(plan)}
    assert set(data["parameters"]) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        said = data["parameters"][name]
        assert said["shape"] == list(parameter.shape)
        assert [eval(text, names) for text in said["placements"]] == [placement(s) for s in stored[name].layout]
    assert any("_StridedShard" in text for p in data["parameters"].values() for text in p["placements"])
    assert any("Shard" in text for p in data["parameters"].values() for text in p["placements"])
    assert "not how work is split" in data["notes"][0]


def test_tied_parameters_are_named_twice_and_told() -> None:
    data = tapas.export(plan_of("gpt2", (2,)), "dtensor").data
    assert data["tied"] == {"lm_head.weight": "transformer.wte.weight"}
    both = [data["parameters"][name] for name in ("lm_head.weight", "transformer.wte.weight")]
    assert both[0] == both[1]


JAX = """
import json, runpy, sys
import jax, numpy
from jax.sharding import NamedSharding
jax.config.update("jax_num_cpu_devices", 4)
said = runpy.run_path(sys.argv[1])
mesh, held = said["mesh"](), {}
for name, shape in json.load(open(sys.argv[2])).items():
    whole = numpy.arange(numpy.prod(shape, dtype=int), dtype=numpy.int32).reshape(shape)
    value = jax.device_put(whole, NamedSharding(mesh, said["SPECS"][name]))
    assert (numpy.asarray(jax.jit(lambda x: 2 * x)(value)) == 2 * whole).all()
    held[name] = [[[i.start or 0, n if i.stop is None else i.stop] for i, n in zip(s.index, shape)] for s in
                  sorted(value.addressable_shards, key=lambda s: s.device.id)]
print(json.dumps({"held": held, "devices": [d.id for d in mesh.devices.flat]}))
"""


def test_jax_gives_each_device_what_its_rank_holds(tmp_path: Path) -> None:
    """Loaded and applied with NamedSharding on four simulated devices."""
    plan = plan_of("llama", (2, 2))
    parameters = stored_parameters(plan)
    assert any(s.sharded for p in parameters for s in p.layout)
    (tmp_path / "specs.py").write_text(tapas.export(plan, "jax").text)
    (tmp_path / "shapes.json").write_text(json.dumps({p.name: p.shape for p in parameters}))
    command = [sys.executable, "-c", JAX, str(tmp_path / "specs.py"), str(tmp_path / "shapes.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["devices"] == [0, 1, 2, 3]
    for parameter in parameters:
        for rank, coord in enumerate(product(range(2), range(2))):
            pieces = local_pieces(parameter.shape, parameter.layout, (2, 2), coord)
            assert found["held"][parameter.name][rank] == [[a, b] for ((a, b),) in pieces], parameter.name


def test_what_jax_cannot_store_is_refused_or_told() -> None:
    plan = plan_of("packed", (2,), "megatron")
    with pytest.raises(PlanError, match=r"\(1\) qkv.weight: its dim 0 is split in each of 3 parts") as refused:
        tapas.export(plan, "jax")
    assert "(2) qkv.bias" in str(refused.value) and "--approximate" in str(refused.value)
    found = tapas.export(plan, "jax", approximate=True)
    assert any("qkv.weight" in text and "stored whole" in text for text in found.dropped)
    assert all(f"Left out: {text}." in found.text for text in found.dropped)
    assert '"qkv.weight": P(),' in found.text


def test_what_is_no_format_or_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tapas.TapasError, match="there is no such format; did you mean dtensor"):
        tapas.export(plan_of("packed", (2,)), "dtensors")
    with pytest.raises(PlanError, match="no such file"):
        tapas.export(tmp_path / "none.json", "dtensor")
    with pytest.raises(PlanError, match="is a Linear"):
        tapas.export(torch.nn.Linear(2, 2), "dtensor")  # type: ignore[arg-type]
