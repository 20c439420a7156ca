"""A model and example inputs for what a user names on the command line."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
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
from tapas.models.userfile import load_file

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
SEQ, BATCH = 512, 64  # where neither the user nor a preset says


@dataclass(frozen=True, slots=True)
class Loaded:
    model: nn.Module
    inputs: dict[str, Any] | tuple[Any, ...]
    name: str
    config: Any = None  # of transformers, or our own
    plan_info: dict[str, Any] = field(default_factory=dict)  # what a plan should remember of this
    sequence: bool = True  # whether its inputs have a length

    def check_seq(self, seq: int | None) -> None:
        """Refuse a length that would change nothing."""
        if seq is not None and not self.sequence:
            raise TapasError(self.name, f"--seq does not change its inputs ({', '.join(self.inputs)})", "leave it out")


def models() -> list[Preset]:
    """All presets, as listed by `tapas models`."""
    return list(PRESETS.values())


def load(
    source: str, *, batch: int | None = None, seq: int | None = None, settings: Mapping[str, str] | None = None,
    training: bool = True, dtype: str = "", device: str = "meta", seed: int = 0,
) -> Loaded:  # fmt: skip
    """A preset's name, `hf:<model_type>`, the path of a config.json, or `file.py:function`.

    On the meta device there are no weights and no data; elsewhere both are drawn from `seed`. Without a dtype
    models are made in bfloat16, except for a user's own: that is taken as it comes."""
    if device == "meta":
        return _load(source, batch, seq, settings, training, dtype, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loaded = _load(source, batch, seq, settings, training, dtype, device)
        if not isinstance(loaded.inputs, dict):
            return loaded
        return replace(loaded, inputs=random_values(loaded.inputs, loaded.config))


def _load(
    source: str, batch: int | None, seq: int | None, settings: Mapping[str, str] | None, training: bool, dtype: str,
    device: str,
) -> Loaded:  # fmt: skip
    settings = dict(settings or {})
    if not source:
        raise TapasError("model", "no model was given", "see `tapas models`, or give hf:<model_type>")
    _check_sizes(source, batch, seq, dtype)
    info = {"source": source, "training": training, "dtype": dtype, "settings": settings}
    if users_own(source):
        options = {"batch": batch, "seq": seq, "training": training}
        model, inputs = load_file(source, options, settings)
        if dtype:
            model, inputs = model.to(DTYPES[dtype]), _converted(inputs, DTYPES[dtype])
        return Loaded(model.train(training), inputs, source, getattr(model, "config", None), info)
    dtype = dtype or "bfloat16"
    if source in PRESETS:
        preset = PRESETS[source]
        batch, seq = batch or preset.batch, seq or _default_seq(preset, settings)
        if preset.model_type == "wide-resnet":
            return _wide_resnet(source, batch, settings, training, dtype, info, device)
        config = hub.config_of_type(source, preset.model_type, preset.fields, settings)
    elif source.startswith("hf:"):
        config = hub.config_of_type(source, source.removeprefix("hf:"), {}, settings)
    elif source.endswith(".json") or Path(source).is_dir():
        path = Path(source)
        config = hub.config_of_file(path / "config.json" if path.is_dir() else path, settings)
    else:
        raise TapasError(source, "no preset has this name", _known(source))
    model, task = hub.build(source, config, DTYPES[dtype], training, device)
    batch = batch or BATCH
    inputs = hub.inputs_for(source, model, task, batch, seq, training)
    info |= {"batch": batch, "seq": _seq_of(inputs)}
    return Loaded(model, inputs, source, config, info, hub.has_sequence(model, task, training))


def _default_seq(preset: Preset, settings: Mapping[str, str]) -> int | None:
    """A preset's length, unless the user made the model's positions fewer."""
    limits = [settings[name] for name in ("max_position_embeddings", "n_positions") if name in settings]
    if preset.seq and limits and limits[0].isdigit():
        return min(preset.seq, int(limits[0]))
    return preset.seq


def _wide_resnet(
    source: str, batch: int, settings: Mapping[str, str], training: bool, dtype: str, info: dict[str, Any], device: str
) -> Loaded:
    config = wide_resnet.WideResNetConfig()
    known = [f.name for f in fields(config)]
    for name, text in settings.items():
        if name not in known:
            raise TapasError(source, f"its configuration has no field {name}", nearest(name, known))
        setattr(config, name, parse(source, name, text, getattr(config, name)))
    model = wide_resnet.build(config, DTYPES[dtype], device).train(training)
    size = config.image_size
    inputs: dict[str, Any] = {"pixel_values": torch.zeros(batch, 3, size, size, device="meta", dtype=DTYPES[dtype])}
    if training:
        inputs["labels"] = ids(batch)
    return Loaded(model, inputs, source, asdict(config), info | {"batch": batch, "seq": None}, sequence=False)


def _check_sizes(source: str, batch: int | None, seq: int | None, dtype: str) -> None:
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise TapasError(source, f"{name} is {value}", f"give a positive number for {name}")
    if dtype and dtype not in DTYPES:
        raise TapasError(source, f"{dtype} is not a dtype to plan in", nearest(dtype, list(DTYPES)))


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


def smaller(loaded: Loaded, planned: bool = False) -> str:
    """How to make a smaller version of a model, as a remedy for one, or for a plan, that is too large to run here."""
    if users_own(loaded.name):
        made = "let the function make a smaller model and smaller inputs (--set gives it arguments)"
        return f"{made}, and make a plan for that" if planned else made
    parts = [("", loaded.config)]
    if not isinstance(loaded.config, dict):
        inner = ((f"{key}.", getattr(loaded.config, key, None)) for key in ("text_config", "vision_config"))
        parts = [(key, part) for key, part in inner if part is not None] or parts
    settings = [f"{key}{setting}" for key, part in parts for setting in _small(part)]
    seq = " --seq 32" if loaded.plan_info.get("seq") else ""
    options = f"{' '.join(f'--set {s}' for s in settings)} --batch 4{seq}"
    if planned:
        return f"make a plan for a smaller version and verify that: tapas plan {loaded.name} {options} -o small.json"
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
