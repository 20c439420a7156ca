"""A model and example inputs for what a user names on the command line."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapas._torch import pytree
from tapas.errors import CaptureError, TapasError, nearest
from tapas.models import hub, wide_resnet
from tapas.models.catalog import PRESETS, Preset
from tapas.models.inputs import ids, random_values
from tapas.models.settings import parse
from tapas.models.source import ModelSource
from tapas.models.userfile import load_file

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
SEQ, BATCH = 512, 64  # where neither the user nor a preset says


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: nn.Module
    inputs: dict[str, Any] | tuple[Any, ...]
    name: str
    config: Any = None  # of transformers, or our own
    seq: int | None = None  # tokens in a sample
    sequence: bool = True  # whether its inputs have a length

    def check_seq(self, seq: int | None) -> None:
        """Refuse a length that would change nothing."""
        if seq is not None and not self.sequence:
            raise TapasError(self.name, f"--seq does not change its inputs ({', '.join(self.inputs)})", "leave it out")


def models() -> list[Preset]:
    """All presets, as listed by `tapas models`."""
    return list(PRESETS.values())


def load(
    model: str, *, batch: int | None = None, seq: int | None = None, settings: Mapping[str, str] | None = None,
    training: bool = True, dtype: str = "", device: str = "meta", seed: int = 0,
) -> LoadedModel:  # fmt: skip
    """A preset's name, `hf:<model_type>`, the path of a config.json, or `file.py:function`."""
    return load_source(ModelSource(model, batch, seq, dict(settings or {}), dtype), training, device, seed)


def load_source(source: ModelSource, training: bool = True, device: str = "meta", seed: int = 0) -> LoadedModel:
    """On the meta device there are no weights and no data; elsewhere both are drawn from `seed`. Without a dtype
    models are made in bfloat16, except for a user's own: that is taken as it comes."""
    if device == "meta":
        return _load(source, training, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loaded = _load(source, training, device)
        if not isinstance(loaded.inputs, dict):
            return loaded
        return replace(loaded, inputs=random_values(loaded.inputs, loaded.config))


def _load(source: ModelSource, training: bool, device: str) -> LoadedModel:
    name = source.model
    if not name:
        raise TapasError("model", "no model was given", "see `tapas models`, or give hf:<model_type>")
    _check_sizes(source)
    if users_own(name):
        return _users_model(source, training)
    dtype = DTYPES[source.dtype or "bfloat16"]
    if name in PRESETS and PRESETS[name].model_type == "wide-resnet":
        return _wide_resnet(source, PRESETS[name], training, dtype, device)
    config, batch, seq = _configured(source)
    model, task = hub.build(name, config, dtype, training, device)
    inputs = hub.inputs_for(name, model, task, batch, seq, training)
    return LoadedModel(model, inputs, name, config, _seq_of(inputs), hub.has_sequence(model, task, training))


def _configured(source: ModelSource) -> tuple[Any, int, int | None]:
    """The configuration of a model of transformers, the batch and the length of its samples."""
    name, settings, seq = source.model, source.settings, source.seq
    if name in PRESETS:
        preset = PRESETS[name]
        config = hub.config_of_type(name, preset.model_type, preset.fields, settings)
        return config, source.batch or preset.batch, seq or _default_seq(preset, settings)
    if name.startswith("hf:"):
        config = hub.config_of_type(name, name.removeprefix("hf:"), {}, settings)
    elif name.endswith(".json") or Path(name).is_dir():
        path = Path(name)
        config = hub.config_of_file(path / "config.json" if path.is_dir() else path, settings)
    else:
        raise TapasError(name, "no preset has this name", _known(name))
    return config, source.batch or BATCH, seq


def _users_model(source: ModelSource, training: bool) -> LoadedModel:
    options = {"batch": source.batch, "seq": source.seq, "training": training}
    model, inputs = load_file(source.model, options, source.settings)
    if source.dtype:
        model, inputs = model.to(DTYPES[source.dtype]), _converted(inputs, DTYPES[source.dtype])
    return LoadedModel(model.train(training), inputs, source.model, getattr(model, "config", None))


def _default_seq(preset: Preset, settings: Mapping[str, str]) -> int | None:
    """A preset's length, unless the user made the model's positions fewer."""
    limits = [settings[name] for name in ("max_position_embeddings", "n_positions") if name in settings]
    if preset.seq and limits and limits[0].isdigit():
        return min(preset.seq, int(limits[0]))
    return preset.seq


def _wide_resnet(source: ModelSource, preset: Preset, training: bool, dtype: torch.dtype, device: str) -> LoadedModel:
    config = wide_resnet.WideResNetConfig()
    known = [f.name for f in fields(config)]
    for name, text in source.settings.items():
        if name not in known:
            raise TapasError(source.model, f"its configuration has no field {name}", nearest(name, known))
        setattr(config, name, parse(source.model, name, text, getattr(config, name)))
    model = wide_resnet.build(config, dtype, device).train(training)
    size, batch = config.image_size, source.batch or preset.batch
    inputs: dict[str, Any] = {"pixel_values": torch.zeros(batch, 3, size, size, device="meta", dtype=dtype)}
    if training:
        inputs["labels"] = ids(batch)
    return LoadedModel(model, inputs, source.model, asdict(config), sequence=False)


def _check_sizes(source: ModelSource) -> None:
    for name, value in (("batch", source.batch), ("seq", source.seq)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise TapasError(source.model, f"{name} is {value}", f"give a positive number for {name}")
    if source.dtype and source.dtype not in DTYPES:
        raise TapasError(source.model, f"{source.dtype} is not a dtype to plan in", nearest(source.dtype, list(DTYPES)))


def _converted(inputs: Any, dtype: torch.dtype) -> Any:
    """Inputs follow the model; whole numbers stay what they are."""

    def made(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return pytree.tree_map(made, inputs)  # capture takes the same nests


def users_own(source: str) -> bool:
    """Whether a source is a Python file of the user's."""
    return source.endswith(".py") or ".py:" in source


def blamed(error: CaptureError, source: str, settings: Mapping[str, str]) -> CaptureError:
    """Where TAPAS made the inputs itself, it is not for the user to check them."""
    if users_own(source) or "example inputs" not in error.fact:
        return error
    remedy = f"this type of model needs other inputs than TAPAS makes: {hub.OWN_FILE}"
    return CaptureError(error.place, error.fact, f"check --set; or {remedy}" if settings else remedy)


# what makes a model small, by the names that configurations have for it; the first name of a row that is there
_SMALL = (
    (("encoder_layers", "num_hidden_layers", "depths"), "2"),
    (("encoder_ffn_dim", "intermediate_size", "d_ff"), "512"),
    (("decoder_ffn_dim",), "512"),
    (("num_local_experts", "num_experts"), "8"),
    (("decoder_layers",), "2"),
    (("encoder_attention_heads", "num_attention_heads"), "8"),
    (("decoder_attention_heads",), "8"),
    (("hidden_size", "d_model"), "256"),
)


MANY_LABELS = 1000


def smaller(loaded: LoadedModel, planned: bool = False) -> str:
    """How to make a smaller version of a model, as a remedy for one, or for a plan, that is too large to run here."""
    if users_own(loaded.name):
        made = "let the function make a smaller model and smaller inputs (--set gives it arguments)"
        return f"{made}, and make a plan for that" if planned else made
    parts = [("", loaded.config)]
    if not isinstance(loaded.config, dict):
        inner = ((f"{key}.", getattr(loaded.config, key, None)) for key in ("text_config", "vision_config"))
        parts = [(key, part) for key, part in inner if part is not None] or parts
    settings = [f"{key}{setting}" for key, part in parts for setting in _small(part)]
    seq = " --seq 32" if loaded.seq else ""
    options = f"{' '.join(f'--set {s}' for s in settings)} --batch 4{seq}"
    if planned:
        command = f"tapas plan {loaded.name} --mesh AxB {options} -o small.json"
        return f"make a plan for a smaller version and verify that: {command}"
    return f"check a smaller version of it: {options}"


def _small(config: Any) -> Iterator[str]:
    has = config.__contains__ if isinstance(config, dict) else partial(hasattr, config)
    for names, value in _SMALL:
        name = next((n for n in names if has(n)), None)
        if name is not None:
            yield f"{name}={value}" if name != "depths" else "depths=[1,1,1,1]"
    if not isinstance(config, dict) and getattr(config, "num_labels", 0) > MANY_LABELS:
        yield "num_labels=10"


def _known(source: str) -> str:
    advice = nearest(source, list(PRESETS))
    return f"{advice} (or hf:<model_type>, a config.json, or file.py:function)"


def _seq_of(inputs: Mapping[str, Any]) -> int | None:
    return inputs["input_ids"].shape[1] if "input_ids" in inputs else None
