"""Example inputs for a transformers model, on the meta device."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from tapas.errors import TapasError


def example_inputs(model: Any, task: str, batch: int, seq: int, training: bool) -> dict[str, Any]:
    """What the model's forward wants for a step of this task."""
    accepted = inspect.signature(model.forward).parameters
    inputs = _main(model, accepted, batch, seq)
    if task in ("seq2seq", "speech"):
        target = min(seq, getattr(model.config, "max_target_positions", seq))
        inputs["labels" if training else "decoder_input_ids"] = ids(batch, target)
    elif training and "labels" in accepted:
        per_token = task in ("causal", "masked", "image-text")
        inputs["labels"] = ids(batch, seq) if per_token else _labels(model, task, batch)
    elif training and "return_loss" in accepted:
        inputs["return_loss"] = True
    return inputs


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device="meta")


def _floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="meta", dtype=torch.get_default_dtype())


def _labels(model: Any, task: str, batch: int) -> torch.Tensor:
    if task == "ctc":
        return ids(batch, 32)
    if task == "segmentation":
        size = field(model.config, "image_size", 224)
        return ids(batch, *_pair(size))
    return ids(batch)


def _main(model: Any, accepted: Any, batch: int, seq: int) -> dict[str, Any]:
    """The main input by its name; models of text and image take both."""
    config, name = model.config, getattr(model, "main_input_name", "input_ids")
    made: dict[str, Any] = {}
    if "input_ids" in accepted and name in ("input_ids", "pixel_values"):
        made["input_ids"] = ids(batch, seq)
    if name == "pixel_values" or ("return_loss" in accepted and "pixel_values" in accepted):
        size = _pair(field(config, "image_size", 224))
        made["pixel_values"] = _floats(batch, field(config, "num_channels", 3), *size)
    elif name == "input_features":
        frames = 2 * field(config, "max_source_positions", 1500)
        made["input_features"] = _floats(batch, field(config, "num_mel_bins", 80), frames)
    elif name == "input_values":
        made["input_values"] = _floats(batch, 16000)
    if not made:
        raise TapasError(
            type(model).__name__,
            f"TAPAS makes no inputs of its kind ({name})",
            "write a function that returns the model and example inputs, and give file.py:function",
        )
    return made


def random_values(inputs: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Values for example inputs without data; a part of the labels of tokens is left out of the loss."""
    tokens, classes = field(config, "vocab_size", 2), field(config, "num_labels", 2)

    def made(name: str, example: Any) -> Any:
        if not (isinstance(example, torch.Tensor) and example.is_meta):
            return example
        if example.is_floating_point():
            return torch.randn(example.shape, dtype=example.dtype)
        per_token = name != "labels" or (example.dim() == 2 and tokens > 2)
        values = torch.randint(tokens if per_token else classes, example.shape, dtype=example.dtype)
        if name == "labels" and per_token:
            values[torch.rand(values.shape) < 0.2] = -100
        return values

    return {name: made(name, example) for name, example in inputs.items()}


def field(config: Any, name: str, default: Any) -> Any:
    """A field of the config or of the part of it that has one."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    for part in (config, *(getattr(config, key, None) for key in ("vision_config", "text_config", "audio_config"))):
        found = getattr(part, name, None)
        if found is not None:
            return found
    return default


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
