"""Every private name of torch that is used, tried on its own: a version of torch without one of them fails here."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tapas import _torch


def test_no_name_is_left_out() -> None:
    assert all(hasattr(_torch, name) for name in _torch.__all__)


def test_fake_tensors_tell_any_device_and_have_no_data() -> None:
    with _torch.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made = torch.empty(1 << 40, device="cuda")
    assert isinstance(made, _torch.FakeTensor)
    assert made.device.type == "cuda"
    assert made.fake_mode is mode
    assert made.constant is None


def test_modes_see_operators_and_can_be_left() -> None:
    seen = []

    class Seeing(_torch.TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing() as mode:
        assert _torch.current_dispatch_mode() is mode
        torch.ones(2) + 1
        with _torch.no_dispatch_modes():
            torch.ones(2) * 2
    assert seen == [torch.ops.aten.ones.default, torch.ops.aten.add.Tensor]
    assert all(isinstance(func, _torch.OpOverload) for func in seen)
    assert isinstance(torch.ops.higher_order.cond, _torch.HigherOrderOperator)


def test_composite_operators_are_those_of_eager_mode() -> None:
    with _torch.no_python_dispatcher():
        assert torch.ones(2).sum() == 2


def test_code_that_asks_is_told_of_an_export() -> None:
    with _torch.as_in_export():
        assert torch.compiler.is_exporting()
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()


def test_a_subclass_that_is_no_operator() -> None:
    class Mine(Tensor):
        __torch_function__ = _torch.ignores_torch_function

    made = _torch.as_subclass(Mine, torch.empty(2, device="meta"), True)
    assert type(made) is Mine
    assert made.requires_grad
    assert type(made + 1) is Tensor
    with _torch.DisableTorchFunction():
        assert made.shape == (2,)


def test_hooks() -> None:
    module = nn.Linear(2, 2)
    assert not _torch.hooked(module)
    module.register_forward_hook(lambda *_: None)
    assert _torch.hooked(module)
    assert not _torch.globally_hooked()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert _torch.globally_hooked()
    handle.remove()
    for made in (torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True) * 2):
        assert _torch.hooks_on([made]) == 0
        made.register_hook(lambda grad: grad)
        assert _torch.hooks_on([made]) == 1
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert _torch.hooks_on([leaf, made]) == 2


def test_attributes_written_on_tensors() -> None:
    with _torch.FakeTensorMode():
        made = [torch.ones(1), torch.ones(2).view(1, 2)]
    for tensor in (*made, torch.ones(1)):
        assert not _torch.has_attributes(tensor)
        tensor.note = 1  # type: ignore[attr-defined]
        assert _torch.has_attributes(tensor)


def test_operators_that_write() -> None:
    assert _torch.writes_to_operands(torch.ops.aten.add_.Tensor)
    assert not _torch.writes_to_operands(torch.ops.aten.add.Tensor)


def test_operators_tell_their_names_and_arguments() -> None:
    assert _torch.operator_name(torch.ops.aten.add.Tensor) == ("add", "Tensor")
    assert _torch.operator_name(torch.ops.aten.relu.default) == ("relu", "default")
    assert [argument.name for argument in _torch.schema_of(torch.ops.aten.add.Tensor).arguments][:2] == [
        "self",
        "other",
    ]


def test_writes_are_counted() -> None:
    made = torch.zeros(2)
    made.view(-1).add_(1)
    assert _torch.writes_to(made) == 1


def test_modules_at_several_places() -> None:
    inner = nn.ReLU()
    assert _torch.held_modules(nn.Sequential(inner, inner)) == {"0": inner, "1": inner}


def test_masks_are_taken_as_given() -> None:
    from torch.nn.modules import transformer

    with _torch.masks_as_given():
        assert not transformer._detect_is_causal_mask(torch.ones(2, 2), None, 2)
        assert transformer._detect_is_causal_mask(None, True)


def test_memory_is_told_without_data() -> None:
    one = torch.empty(4, device="meta")
    assert len(set(_torch.storages([one, one.view(2, 2), one.clone()]))) == 2


def test_autocast_of_any_device() -> None:
    assert not _torch.autocasting()
    with torch.autocast("cpu"):
        assert _torch.autocasting()


def test_checkpoints_only_call_their_function() -> None:
    from torch.utils.checkpoint import checkpoint

    entered: list[str] = []

    @contextmanager
    def region(function: Any, *_: Any) -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    with _torch.checkpoints_patched(region):
        assert checkpoint(lambda x: [*entered, x], 1, use_reentrant=False) == ["in", 1]
    assert entered == ["in", "out"]


def test_functions_that_code_holds_on_to() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    held = Twice.apply
    with _torch.applied_functions_patched(lambda cls, *args: (cls, args)):
        assert held(torch.ones(1)) == (Twice, (torch.ones(1),))
    assert held(torch.ones(1)) == 2


def test_flattening() -> None:
    flat, spec = _torch.pytree.tree_flatten({"a": [1, 2], "b": (3,)})
    assert flat == [1, 2, 3]
    assert _torch.pytree.tree_unflatten(flat, spec) == {"a": [1, 2], "b": (3,)}
    assert _torch.pytree.tree_flatten(1)[1].is_leaf()


def test_an_export_can_be_made_silent() -> None:
    from torch.export import _trace

    with _torch.silent_export():
        assert "print" in vars(_trace)
    assert "print" not in vars(_trace)


def test_checks_of_values_can_be_replaced() -> None:
    asked: list[str] = []
    distribution = torch.distributions.Bernoulli
    with (
        _torch.tensor_checks_replaced(lambda plain, *_: asked.append("check"), lambda plain, number: plain(number)),
        _torch.distributions_unchecked(lambda: asked.append("distribution")),
    ):
        torch._check_tensor_all(torch.tensor([False]))
        distribution(probs=torch.tensor(2.0))
    assert asked[0] == "check" and set(asked) <= {"check", "distribution"}
    with pytest.raises(RuntimeError):
        torch._check_tensor_all(torch.tensor([False]))
    with pytest.raises(ValueError, match="probs"):
        distribution(probs=torch.tensor(2.0), validate_args=True)


def test_arguments_of_an_operator() -> None:
    assert _torch.schema_arguments(torch.ops.aten.add.Tensor) == (("self", None), ("other", None), ("alpha", 1))


def test_the_end_of_a_backward_pass() -> None:
    seen: list[bool] = []
    leaf = torch.ones(1, requires_grad=True)

    def arrived(_: Tensor) -> None:
        seen.append(_torch.in_backward())
        _torch.when_backward_ends(lambda: seen.append(leaf.grad is not None))

    leaf.register_post_accumulate_grad_hook(arrived)
    (leaf * 2).sum().backward()
    assert seen == [True, True]
    assert not _torch.in_backward()


def test_who_holds_memory() -> None:
    one = torch.ones(4)
    alone = _torch.storage_holders(one)
    view = one[:2]
    assert _torch.storage_holders(one) > alone
    del view
    assert _torch.storage_holders(one) == alone


def test_parts_of_distributed_tensors() -> None:
    from torch.distributed.tensor import DTensor

    given = {"_local_tensor": torch.ones(2)}
    assert _torch.local_part(type("Part", (), given)) is given["_local_tensor"]
    assert "_spec" in DTensor.__slots__ and "_local_tensor" in DTensor.__slots__
    placed = _torch.strided_shard(1, 3)
    assert (placed.dim, placed.split_factor) == (1, 3)


def test_packed_weights_can_be_made_whole() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from tests.faithful.ranks import thread_groups

    def gathered(mesh: DeviceMesh) -> Tensor:
        part = torch.arange(6.0).view(3, 2)[:, mesh.get_local_rank()]  # of three segments, half of each
        return _torch.whole_tensor(DTensor.from_local(part, mesh, [_torch.strided_shard(0, 3)]))

    with thread_groups() as ranks:
        for whole in ranks((2,))(gathered):
            assert whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_profile_has_spans_that_others_end(tmp_path: Path) -> None:
    class Work:
        def __init__(self) -> None:
            self.future = torch.futures.Future()

        def get_future(self) -> Any:
            return self.future

    class Untold(Work):
        def get_future(self) -> Any:
            raise RuntimeError("not implemented")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        work, future = _torch.profiled_until("long", Work)
        assert _torch.profiled_until("launch", Untold)[1] is None
        with _torch.profiled_span("short"):
            torch.ones(2, requires_grad=True).exp().sum().backward()
        work.future.set_result(None)
        future.wait()
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    profile = json.loads((tmp_path / "profile.json").read_bytes())
    events = {e["name"]: e for e in profile["traceEvents"] if e["ph"] == "X"}
    ends = {name: e["ts"] + e["dur"] for name, e in events.items()}
    assert ends["launch"] <= events["short"]["ts"] and ends["short"] <= ends["long"]
    assert "baseTimeNanoseconds" in profile
    nodes = "autograd::engine::evaluate_function: "
    assert events["aten::exp"]["args"]["Sequence number"] == events[f"{nodes}ExpBackward0"]["args"]["Sequence number"]


def test_store_and_timeout_of_process_groups() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    seconds = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=seconds)  # type: ignore[attr-defined]
    try:
        store = _torch.default_store()
        store.set("tapas", "1")
        assert store.check(["tapas"]) and not store.check(["sapat"]) and store.get("tapas") == b"1"
        store.set_timeout(store.timeout)
        assert _torch.timeout_of(dist.group.WORLD, "cpu") == seconds
    finally:
        dist.destroy_process_group()


def test_what_is_compiled() -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    module = nn.Linear(2, 2)
    assert _torch.uncompiled(module) is module
    assert "_orig_mod" in OptimizedModule.__annotations__ or "_orig_mod" in OptimizedModule.__init__.__code__.co_names


def test_metadata_of_checkpoints() -> None:
    from importlib import import_module

    for module, names in _torch.CHECKPOINT_CLASSES.items():
        assert all(hasattr(import_module(module), name) for name in names)


def test_gates_of_experts() -> None:
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

    sizes = {"num_local_experts": 2, "hidden_size": 4, "intermediate_size": 3}
    gate = _torch.gate_of(MixtralExperts(MixtralConfig(**sizes)))
    assert gate is not None and gate(torch.ones(2, 6)).shape == (2, 3)
    assert _torch.gate_of(nn.Linear(2, 2)) is None


def attended(kernel: str | None, device: str, dtype: torch.dtype, near: float) -> None:
    """Causal attention and its gradients by a fused kernel, against plain products."""
    q, k, v, gradient = (torch.randn(2, 3, 40, 8, dtype=dtype, device=device) for _ in range(4))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    later = ~torch.ones(40, 40, dtype=torch.bool, device=device).tril()
    scores = (wide[0] @ wide[1].mT * 0.3).masked_fill(later, -torch.inf)
    whole = scores.softmax(-1) @ wide[2]
    wanted = torch.autograd.grad(whole, wide, gradient.double())
    made = _torch.fused_attention(q, k, v, True, 0.3, kernel)
    assert made is not None
    found = _torch.fused_attention_backward(gradient, q, k, v, *made, True, 0.3, kernel)
    assert found is not None
    for one, two in zip((*made, *found), (whole, scores.logsumexp(-1), *wanted), strict=True):
        torch.testing.assert_close(one.double(), two.detach(), rtol=near, atol=near)


def test_fused_attention_tells_the_logarithms_of_its_sums() -> None:
    attended(None, "cpu", torch.float64, 1e-9)
    q, k = torch.randn(2, 2, 3, 5, 4)
    assert _torch.fused_attention(q, k, k[..., :2], True, 0.3) is None


def test_assertions_say_their_text() -> None:
    _torch.assert_on_device(torch.tensor(True), "all fits")
    with pytest.raises(RuntimeError, match="all fits"):
        _torch.assert_on_device(torch.tensor(False), "all fits")


ON_GPUS = [("flash", torch.bfloat16), ("efficient", torch.float32)]


@pytest.mark.parametrize(("kernel", "dtype"), ON_GPUS)
def test_fused_attention_of_gpus_can_be_called(kernel: str, dtype: torch.dtype) -> None:
    """Without a GPU: what goes in, and the shapes of what comes out."""
    with _torch.FakeTensorMode():
        q, k, v, gradient = (torch.empty(2, 3, 40, 8, dtype=dtype, device="cuda") for _ in range(4))
        made = _torch.fused_attention(q, k, v, True, 0.3, kernel)
        assert made is not None and made[0].shape == q.shape and made[1].shape == q.shape[:-1]
        assert made[1].dtype == torch.float32
        found = _torch.fused_attention_backward(gradient, q, k, v, *made, True, 0.3, kernel)
        assert found is not None and [x.shape for x in found] == [x.shape for x in (q, k, v)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of GPUs")
@pytest.mark.parametrize(("kernel", "dtype"), ON_GPUS)
def test_fused_attention_of_gpus(kernel: str, dtype: torch.dtype) -> None:
    attended(kernel, "cuda", dtype, 0.05 if dtype == torch.bfloat16 else 1e-3)
    q = torch.randn(2, 3, 40, 8, dtype=dtype, device="cuda")
    assert _torch._fused_attention(q, q, q, True) == kernel
