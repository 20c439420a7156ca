"""Presets and other sources: they load without weights, capture, and the capture computes what the model does."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tapas.capture import capture, capture_program
from tapas.errors import CaptureError, TapasError
from tapas.ir.custom_ops import experts
from tapas.ir.interpreter import leaf_values, run
from tapas.models.load import LoadedModel, blamed, load, models, smaller
from tapas.models.wide_resnet import WideResNet, WideResNetConfig

pytest.importorskip("transformers")

_DECODER = {
    "hidden_size": "32", "intermediate_size": "48", "num_hidden_layers": "2", "num_attention_heads": "4",
    "vocab_size": "99",
}  # fmt: skip
_GROUPED = _DECODER | {"num_key_value_heads": "2", "head_dim": "8"}
_NO_DROPOUT = {"hidden_dropout_prob": "0.0", "attention_probs_dropout_prob": "0.0"}
_SMALL: dict[str, dict[str, str]] = {
    "llama3-8b": _GROUPED,
    "gpt2-xl": {
        "n_embd": "30", "num_hidden_layers": "2", "n_head": "5", "vocab_size": "99", "n_positions": "16",
        "resid_pdrop": "0.0", "embd_pdrop": "0.0", "attn_pdrop": "0.0",
    },
    "bert-large": _DECODER | _NO_DROPOUT,
    "t5-11b": {
        "d_model": "32", "d_ff": "48", "d_kv": "8", "num_heads": "4", "num_layers": "2", "vocab_size": "99",
        "dropout_rate": "0.0",
    },
    "vit-h14": {
        "hidden_size": "32", "intermediate_size": "48", "num_hidden_layers": "2", "num_attention_heads": "4",
        "image_size": "28", "num_labels": "10",
    },
    "mixtral-8x7b": _GROUPED | {"num_local_experts": "4"},
    "qwen3-0.6b": _GROUPED,
    "qwen3-30b-a3b": _GROUPED | {"num_experts": "6", "num_experts_per_tok": "3", "moe_intermediate_size": "16"},
    "resnet50": {"embedding_size": "8", "hidden_sizes": "[8, 16]", "depths": "[2, 1]", "num_labels": "10"},
    "wide-resnet": {"depths": "(1, 1)", "num_labels": "10", "image_size": "32"},
    "whisper-large": {
        "d_model": "32", "encoder_layers": "2", "decoder_layers": "2", "encoder_attention_heads": "4",
        "decoder_attention_heads": "4", "encoder_ffn_dim": "48", "decoder_ffn_dim": "48", "vocab_size": "99",
        "num_mel_bins": "8", "max_source_positions": "12", "max_target_positions": "12", "pad_token_id": "0",
        "decoder_start_token_id": "1",
    },
    "clip-vit-l14": {
        f"{part}_config.{name}": value
        for part in ("text", "vision")
        for name, value in {
            "hidden_size": "32", "intermediate_size": "48", "num_hidden_layers": "2", "num_attention_heads": "4",
        }.items()
    } | {"vision_config.image_size": "28", "text_config.vocab_size": "99", "text_config.eos_token_id": "3"},
}  # fmt: skip


def small(name: str, training: bool) -> LoadedModel:
    return load(name, batch=2, seq=8, settings=_SMALL[name], training=training, dtype="float64")


def with_weights(loaded: LoadedModel, training: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        wide = isinstance(loaded.model, WideResNet)
        config = WideResNetConfig(**loaded.config) if wide else loaded.config
        return type(loaded.model)(config).train(training)
    finally:
        torch.set_default_dtype(torch.float32)


def with_values(inputs: dict[str, Any], classes: int) -> dict[str, Any]:
    def value(tensor: Tensor) -> Tensor:
        return (
            torch.randint(1, classes, tensor.shape)
            if tensor.dtype == torch.long
            else torch.randn(tensor.shape).double()
        )

    return {name: value(v) if isinstance(v, Tensor) else v for name, v in inputs.items()}


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.full)], ids=["training", "inference"])
@pytest.mark.parametrize("name", _SMALL)
def test_replay_equals_the_model(name: str, training: bool) -> None:
    loaded = small(name, training)
    model = with_weights(loaded, training)
    inputs = with_values(loaded.inputs, 10)
    captured = capture_program(model, inputs, training=training)
    graph = captured.graph
    reference = copy.deepcopy(model)
    if "experts" in str(reference):
        reference.set_experts_implementation("eager")  # the loop that defines what experts compute
    expected = reference(**inputs)
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
    got = run(graph, leaf_values(graph, model, tensors) | captured.constants)
    flat = [t for t in torch.utils._pytree.tree_leaves(expected) if isinstance(t, Tensor)]
    buffers = dict(reference.named_buffers())
    flat += [buffers[graph.leaf_of[buffer].paths[0]] for buffer, _ in graph.writes]
    assert len(flat) == len(got)
    for mine, theirs in zip(got, flat, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert graph.training == training
    if training:
        assert graph.loss == graph.outputs[0]
        flat[0].backward()
        got[0].backward()
        mine = dict(model.named_parameters())
        for path, parameter in reference.named_parameters():
            torch.testing.assert_close(mine[path].grad, parameter.grad, msg=lambda m, p=path: f"{p}: {m}")


def test_experts_are_one_operator_and_models_stay_as_they_were() -> None:
    loaded = small("qwen3-30b-a3b", True)
    before = loaded.config._experts_implementation
    graph = capture(loaded.model, loaded.inputs)
    assert [op.target for op in graph.ops].count("tapas.experts.default") == 2
    assert not [op for op in graph.ops if "sort" in op.target or "grouped_mm" in op.target]
    assert loaded.config._experts_implementation == before


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_experts_gradients_and_skipped_slots(activation: str) -> None:
    torch.manual_seed(0)
    hidden, weight, gate_up, down = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (5, 2), (4, 4, 3), (4, 3, 2))
    )
    index = torch.tensor([[0, 1], [3, 2], [1, 3], [0, 0], [4, -1]])  # the last token has no expert
    whole = experts(hidden, index, weight, gate_up, down, activation)
    assert torch.equal(whole[-1], torch.zeros(3, dtype=torch.float64))
    low = experts(hidden, index, weight, gate_up[:2], down[:2], activation)
    high = experts(hidden, index - 2, weight, gate_up[2:], down[2:], activation)
    torch.testing.assert_close(low + high, whole)
    assert torch.autograd.gradcheck(
        lambda h, w, g, d: experts(h, index, w, g, d, activation), (hidden, weight, gate_up, down)
    )


@pytest.mark.parametrize("name", ["llama3-405b", "gpt3-175b", "resnet50-100k", "t5-3b", "qwen3-32b"])
def test_real_sizes_without_weights(name: str) -> None:
    layers = {"depths": "[1, 1, 1, 1]"} if name.startswith("resnet") else {"num_hidden_layers": "2"}
    loaded = load(name, settings=layers)
    graph = capture(loaded.model, loaded.inputs)
    assert {p.device.type for p in loaded.model.parameters()} == {"meta"}
    assert graph.tensors[graph.parameters()[0].tensor].dtype == "bfloat16"
    assert graph.training
    biggest = max(graph.tensors[leaf.tensor].nbytes for leaf in graph.leaves)
    assert biggest > 5e7


def test_presets_have_their_published_sizes() -> None:
    for preset in models():
        found = sum(p.numel() for p in load(preset.name).model.parameters())
        assert abs(found / preset.parameters - 1) < 0.005, preset.name


def test_causal_masks_are_left_to_the_kernel() -> None:
    loaded = small("llama3-8b", True)
    graph = capture(loaded.model, loaded.inputs)
    attention = [op for op in graph.ops if "attention" in op.target]
    assert len(attention) == 2 and all(op.args[3] is None and op.args[5] is True for op in attention)
    mask = {"attention_mask": torch.ones(2, 8, dtype=torch.long, device="meta")}
    masked = capture(loaded.model, loaded.inputs | mask)
    assert all(len(op.operands) == 4 for op in masked.ops if "attention" in op.target)


def test_module_paths_follow_the_model() -> None:
    loaded = small("llama3-8b", True)
    graph = capture(loaded.model, loaded.inputs)
    paths = {path for path, _ in loaded.model.named_modules()}
    assert {op.module for op in graph.ops} <= paths
    assert graph.producers["linear"].module == "model.layers.0.self_attn.q_proj"
    assert graph.producers["transpose"].source.startswith("modeling_llama.py:")


def test_gpt2_products_keep_their_dims() -> None:
    loaded = small("gpt2-xl", True)
    graph = capture(loaded.model, loaded.inputs)
    targets = [op.target for op in graph.ops]
    assert "aten.addmm.default" not in targets and targets.count("tapas.affine.default") == 8


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("hf:llama", _DECODER),
        ("hf:distilbert", {"dim": "32", "hidden_dim": "48", "n_layers": "2", "n_heads": "4", "vocab_size": "99"}),
        ("hf:bart", {"d_model": "32", "encoder_layers": "2", "decoder_layers": "2", "encoder_ffn_dim": "48",
                     "decoder_ffn_dim": "48", "encoder_attention_heads": "4", "decoder_attention_heads": "4"}),
        ("hf:convnext", {"hidden_sizes": "[8, 16, 16, 32]", "depths": "[1, 1, 2, 1]"}),
    ],
)  # fmt: skip
def test_any_model_type_of_transformers(source: str, settings: dict[str, str]) -> None:
    loaded = load(source, batch=2, seq=8, settings=settings)
    graph = capture(loaded.model, loaded.inputs, training=True)
    assert graph.loss is not None
    inference = load(source, batch=2, seq=8, settings=settings, training=False)
    assert "labels" not in inference.inputs and not inference.model.training


def test_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    small("llama3-8b", True).config.save_pretrained(tmp_path)
    loaded = load(str(path), batch=2, seq=8, settings={"num_hidden_layers": "1"})
    assert loaded.config.num_hidden_layers == 1 and loaded.config.hidden_size == 32
    assert load(str(tmp_path), batch=2, seq=8).config.num_hidden_layers == 2
    path.write_text("{")
    with pytest.raises(TapasError, match="is not JSON"):
        load(str(path))
    path.write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(TapasError, match="has no model_type"):
        load(str(path))
    with pytest.raises(TapasError, match="cannot be read: No such file"):
        load(str(tmp_path / "missing.json"))


_FILE = """
import torch

def make(batch=4, width: int = 8):
    return torch.nn.Linear(width, 3), (torch.zeros(batch, width),)

def wrong():
    return 1

def broken():
    x = 1
    raise ValueError("no luck")
"""


def test_python_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(_FILE)
    loaded = load(f"{path}:make", batch=6, settings={"width": "5"})
    assert loaded.inputs[0].shape == (6, 5)
    for function, message in {
        "mak": "it has no function mak; did you mean make",
        "wrong": "the function returned a int; return \\(model, inputs\\)",
        "broken": r"mine\.py:12: ValueError: no luck",
    }.items():
        with pytest.raises(TapasError, match=message):
            load(f"{path}:{function}")
    with pytest.raises(TapasError, match="takes no argument seq"):
        load(f"{path}:make", seq=7)
    with pytest.raises(TapasError, match="takes no argument widht; did you mean width"):
        load(f"{path}:make", settings={"widht": "7"})
    with pytest.raises(TapasError, match=r"which function.*make"):
        load(str(path))
    with pytest.raises(TapasError, match="no such file"):
        load(f"{tmp_path}/other.py:make")
    path.write_text("import torch\nx = (\n")
    with pytest.raises(TapasError, match=r"mine\.py:\d: SyntaxError"):
        load(f"{path}:make")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("llama3-8", {}, "llama3-8: no preset has this name; did you mean llama3-8b"),
        ("hf:lama", {}, "hf:lama: transformers has no model type lama; did you mean .*llama"),
        ("gpt2", {"settings": {"num_layer": "2"}}, "has no field num_layer; did you mean"),
        ("gpt2", {"settings": {"n_layer": "two"}}, "n_layer=two is not of type int"),
        ("wide-resnet", {"settings": {"depth": "2"}}, "has no field depth; did you mean depths"),
        ("hf:clip", {"settings": {"text_config.layers": "2"}}, "has no field text_config.layers"),
        ("llama3-8b", {"settings": {"num_attention_heads": "3"}}, "not a multiple of the number of attention heads"),
        ("gpt2", {"seq": 4096}, "seq 4096 is beyond its 1024 positions; use --seq 1024"),
        ("gpt2", {"batch": 0}, "batch is 0; give a positive number"),
        ("gpt2", {"dtype": "bfloat"}, "bfloat is not a dtype to plan in; did you mean bfloat16"),
    ],
)
def test_wrong_sources_are_explained(source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TapasError, match=message):
        load(source, **options)


LARGEST = {preset.model_type: preset.name for preset in models()}  # the last of each family


@pytest.mark.parametrize(
    "name", [pytest.param(p.name, marks=() if p.name in LARGEST.values() else pytest.mark.full) for p in models()]
)
def test_smaller_versions_can_be_made(name: str) -> None:
    """What is advised for models that are too large to run here."""
    words = smaller(load(name)).split()
    settings = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--set")
    loaded = load(name, batch=4, seq=32 if "--seq" in words else None, settings=settings)
    assert sum(p.numel() for p in loaded.model.parameters()) < 120e6


def test_inputs_that_are_not_the_users_are_not_blamed_on_the_user() -> None:
    error = CaptureError("LxmertModel", "the model fails on the example inputs (input_ids)", "check their shapes")
    assert "file.py:function" in blamed(error, "hf:lxmert", {}).remedy
    assert "check --set" in blamed(error, "hf:lxmert", {"a": "1"}).remedy
    assert blamed(error, "own.py:make", {}) is error
    other = CaptureError("m", "the program depends on the values of a tensor", "compute it with fixed sizes instead")
    assert blamed(other, "hf:lxmert", {}) is other
