"""Inputs with values for a small model of transformers: text with places for images, boxes, series."""

import inspect
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from tapas.models.inputs import example_inputs, field
from tapas.models.tiny import CROPPED

BATCH, SEQ = 2, 16
Accepted = Mapping[str, Any]


def tiny_inputs(model: Any, task: str, training: bool, cropped: bool = True) -> dict[str, Any]:
    """What its forward wants for a step of its task; images are small where the configuration leaves that open."""
    accepted = inspect.signature(model.forward).parameters
    makers = {"image-text": _image_text, "detection": _detection, "instances": _instances, "forecast": _forecast}
    if task in makers:
        return makers[task](model, accepted, training)
    made = _filled(model, example_inputs(model, task, BATCH, SEQ, training))
    if cropped and "pixel_values" in made and field(model.config, "image_size", None) is None:
        made["pixel_values"] = made["pixel_values"][..., :CROPPED, :CROPPED]
        if task == "segmentation":
            made["labels"] = made["labels"][..., :CROPPED, :CROPPED]
    if "pixel_values" in accepted and "pixel_values" not in made and task == "none":
        made |= _image(model)
    if "decoder_input_ids" in accepted and task == "none":
        made["decoder_input_ids"] = made["input_ids"]
    if task == "seq2seq" and "attention_mask" in accepted and "input_ids" in made:
        made["attention_mask"] = torch.ones_like(made["input_ids"])
    if "bbox" in accepted and "input_ids" in made:
        made["bbox"] = torch.zeros(*made["input_ids"].shape, 4, dtype=torch.long)
    return made


def _filled(model: Any, examples: dict[str, Any]) -> dict[str, Any]:
    """Values in place of inputs without data; speech is cut to what a small model needs."""
    vocabulary, classes = field(model.config, "vocab_size", 2), getattr(model.config, "num_labels", 2)
    made: dict[str, Any] = {}
    for name, example in examples.items():
        if not isinstance(example, torch.Tensor):
            made[name] = example
        elif example.is_floating_point():
            shape = (BATCH, 2000) if name == "input_values" and example.dim() == 2 else tuple(example.shape)
            made[name] = torch.randn(shape)
        else:
            small = name == "labels" and example.dim() != 2
            most = classes if small else min(96, vocabulary)
            made[name] = torch.randint(3 if most > 4 else 0, most, _cut(name, tuple(example.shape)))
    return made


def _cut(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], 4) if name == "labels" and shape[1:] == (32,) else shape  # of CTC: fewer than there are frames


def _image(model: Any) -> dict[str, torch.Tensor]:
    size = field(model.config, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    return {"pixel_values": torch.randn(BATCH, field(model.config, "num_channels", 3), height, width)}


def _text(vocabulary: int, length: int = SEQ) -> torch.Tensor:
    return torch.randint(3, min(96, vocabulary), (BATCH, length))


# -- text with images ----------------------------------------------------------------------------


def _image_text(model: Any, accepted: Accepted, training: bool) -> dict[str, Any]:
    if "image_grid_thw" in accepted:
        media, each = _patches(model)
    else:
        media = _image(model)
        if "image_sizes" in accepted and "LlavaNext" in type(model).__name__:
            media["image_sizes"] = torch.tensor([[*media["pixel_values"].shape[-2:]]] * BATCH)
        each = -1
    media = _with_image_dim(model, media)
    if each < 0:
        each = _features(model, media)
    token = next(
        (getattr(model.config, n) for n in _IMAGE_TOKENS if isinstance(getattr(model.config, n, None), int)), 0
    )
    ids = _text(field(model.config, "vocab_size", 96))
    if each:
        start = getattr(model.config, "vision_start_token_id", None)
        before = torch.full((BATCH, 1), start) if isinstance(start, int) else ids[:, :1]
        ids = torch.cat([before, torch.full((BATCH, each), token), ids], 1)
    made = {"input_ids": ids, **media}
    if "mm_token_type_ids" in accepted:
        made["mm_token_type_ids"] = (ids == token).long()
    if "token_type_ids" in accepted and training:
        made["token_type_ids"] = (ids == token).long() if "mm_encoder_outputs" in accepted else torch.ones_like(ids)
    if "attention_mask" in accepted:
        made["attention_mask"] = torch.ones_like(ids)
    if "qformer_input_ids" in accepted:
        made["qformer_input_ids"] = _text(96, 8)
    return made | ({"labels": ids.clone()} if training and "labels" in accepted else {})


_IMAGE_TOKENS = ("image_token_id", "image_token_index")


def _patches(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Images as rows of patches, with their grids; and how many tokens stand for one."""
    vision = model.config.vision_config
    patch, frames = vision.patch_size, getattr(vision, "temporal_patch_size", 1)
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", getattr(vision, "num_channels", 3)))
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    rows = torch.randn(16 * BATCH, channels * frames * patch * patch)
    return {"pixel_values": rows, "image_grid_thw": grid}, 16 // getattr(vision, "spatial_merge_size", 2) ** 2


def _with_image_dim(model: Any, media: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some take several images, or several crops of one."""
    if any(word in type(model).__name__ for word in ("Idefics", "SmolVLM", "LlavaNext")):
        pixels = media["pixel_values"][:, None]
        crops = 2 if "LlavaNext" in type(model).__name__ else 1
        return media | {"pixel_values": pixels.repeat(1, crops, 1, 1, 1)}
    return media


def _features(model: Any, media: dict[str, torch.Tensor]) -> int:
    """How many tokens an image becomes: the model itself is asked."""
    ask = getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None)
    if ask is None:
        return 0
    was = model.training
    with torch.no_grad():
        try:
            found = ask(**media)
        except Exception:  # then it takes them some other way, or fails in its own words when it is called
            return 0
        finally:
            model.train(was)
    pooled = getattr(found, "pooler_output", found)
    parts = (
        [pooled] if isinstance(pooled, torch.Tensor) else [part for part in pooled if isinstance(part, torch.Tensor)]
    )
    return sum(prod(part.shape[:-1]) for part in parts) // BATCH


# -- boxes, masks, series ------------------------------------------------------------------------


def _detection(model: Any, accepted: Accepted, training: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"pixel_values": torch.randn(BATCH, 3, *_size(model))}
    if "input_ids" in accepted:
        made["input_ids"] = _text(field(model.config, "vocab_size", 96), 8)
        if "token_type_ids" not in accepted:  # one text for each class
            made["input_ids"][:, -1] = made["input_ids"].max() + 1
    if training and "labels" in accepted:
        made["labels"] = [_boxes(getattr(model.config, "num_labels", 2)) for _ in range(BATCH)]
    return made


def _size(model: Any) -> tuple[int, int]:
    size = field(model.config, "image_size", 64)
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _boxes(classes: int) -> dict[str, torch.Tensor]:
    return {"class_labels": torch.randint(0, classes, (2,)), "boxes": 0.25 + 0.5 * torch.rand(2, 4)}


def _instances(model: Any, accepted: Accepted, training: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"pixel_values": torch.randn(BATCH, 3, 64, 64)}
    if "task_inputs" in accepted:
        made["task_inputs"] = torch.randint(1, 90, (BATCH, getattr(model.config, "task_seq_len", 77)))
    if training:
        classes = max(getattr(model.config, "num_labels", 2), 2)
        made["mask_labels"] = [(torch.rand(2, 64, 64) > 0.5).float() for _ in range(BATCH)]
        made["class_labels"] = [torch.randint(0, classes, (2,)) for _ in range(BATCH)]
        if "text_inputs" in accepted:
            made["text_inputs"] = torch.randint(1, 90, (BATCH, 4, 77))
    return made


def _forecast(model: Any, accepted: Accepted, training: bool) -> dict[str, Any]:
    config = model.config
    if "past_time_features" in accepted:
        past = config.context_length + max(config.lags_sequence)
        ahead, extra = config.prediction_length, config.num_time_features
        made = {
            "past_values": torch.rand(BATCH, past), "past_time_features": torch.rand(BATCH, past, extra),
            "past_observed_mask": torch.ones(BATCH, past), "future_values": torch.rand(BATCH, ahead),
            "future_time_features": torch.rand(BATCH, ahead, extra),
        }  # fmt: skip
        return {name: value for name, value in made.items() if name in accepted}
    length, series = getattr(config, "context_length", 32), getattr(config, "num_input_channels", 1)
    if "freq" in accepted:
        return {"past_values": torch.rand(BATCH, length), "freq": torch.zeros(BATCH, dtype=torch.long)}
    made = {"past_values": torch.rand(BATCH, length, series)}
    if training and "future_values" in accepted:
        made["future_values"] = torch.rand(BATCH, config.prediction_length, series)
    return made
