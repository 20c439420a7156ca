"""Small models of transformers that run: where the first configuration or the first inputs do not go together, others
are tried, and the first that the model takes are used."""

import inspect
import re
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import nn

from tapas.errors import TapasError
from tapas.models import hub
from tapas.models.completed import completed
from tapas.models.documented import documented_inputs
from tapas.models.inputs import field
from tapas.models.tiny import tiny_config
from tapas.models.tiny_inputs import BATCH, SEQ, tiny_inputs

MOST_PARAMETERS = 40_000_000  # of a model that is small in the number of its layers only
PATIENCE = 12.0  # seconds of processor time, after which no more is tried
KINDS = (
    {}, {"filled": True}, {"sections": True}, {"listed": True}, {"divided": True, "cropped": True}, {"divided": True},
    {"divided": True, "listed": True},
    {"wide": True, "cropped": True}, {"wide": True},
)  # fmt: skip
Inputs = dict[str, Any]


def tiny_model(model_type: str, training: bool = True) -> tuple[nn.Module, Inputs]:
    """A small model of a type with its weights, and inputs with values, for the task that it was made for."""
    first: Exception | None = None
    until = time.process_time() + PATIENCE
    for kind in KINDS:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                inputs = _taken(*_made(model_type, training, **kind), training, until)
                torch.manual_seed(0)
                return _made(model_type, training, **kind)[0], inputs  # anew: some keep what they were called with
        except Exception as error:  # whatever a small configuration, or made-up inputs, are not good enough for
            first = first or error
        if time.process_time() > until:
            break
    assert first is not None
    raise first


def _made(model_type: str, training: bool, **kind: bool) -> tuple[nn.Module, str]:
    place, config = f"hf:{model_type}", tiny_config(model_type, **kind)
    if kind:  # the first is small with hardly an exception
        _check_size(place, hub.build(place, config, torch.float32, training, "meta")[0])
    model, task = hub.build(place, config, torch.float32, training, "cpu")
    _check_size(place, model)
    return model, task


def _check_size(place: str, model: nn.Module) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS:
        raise TapasError(place, f"has {parameters:,} parameters", "give a smaller configuration")


def _taken(model: nn.Module, task: str, training: bool, until: float) -> Inputs:
    """The first inputs that the model runs with, of those that there is time for."""
    first: Exception | None = None
    fitting = (lambda: tiny_inputs(model, task, training), lambda: tiny_inputs(model, task, training, cropped=False))
    for form, make in (*product(_FORMS[:1], fitting), *_others(model, training)):
        state = torch.random.get_rng_state()
        try:
            return completed(model, make(), lambda name, form=form: _value(model, name, form))
        except Exception as error:  # as above
            torch.random.set_rng_state(state)
            first = first or error
        if time.process_time() > until:
            break
    assert first is not None
    if training and re.search(r"\btrain(ing|able)\b", str(first).lower()):  # it has no loss, and says so
        return _taken(model, task, False, until)
    raise first


# -- inputs by their names -----------------------------------------------------------------------------------------


Form = tuple[int, bool, bool]  # the side of images; whether dims are turned; whether there is one more
_FORMS: tuple[Form, ...] = tuple((32, turned, several) for turned in (False, True) for several in (False, True))


def _others(model: nn.Module, training: bool) -> Iterator[tuple[Form, Callable[[], Inputs]]]:
    """Inputs by the names in the signature, in some forms that models take them in; text alone first."""
    accepted = inspect.signature(model.forward).parameters
    config: Any = model.config
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [name for name, p in accepted.items() if p.default is p.empty and p.kind not in several]
    text = [name for name in ("input_ids", "labels" if training else "") if name in accepted]
    alone = dict.fromkeys((*required, *text))
    for form in _FORMS if text else ():
        yield form, lambda form=form: {name: _value(model, name, form) for name in alone}
    if "grid_thw" in accepted:
        rows = next((name for name in ("hidden_states", "pixel_values") if name in accepted), "hidden_states")
        yield _FORMS[0], lambda: {rows: _patches(config).flatten(0, 1), "grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}
    named = dict.fromkeys((*required, *(name for name in accepted if name in _MAIN), *text))
    beside = [name for name in accepted if name.endswith(_BESIDE) and name not in named]
    if not {"input_ids", "inputs_embeds"} <= named.keys():
        for form in product(_sizes(config), (False, True), (False, True)):
            yield form, lambda form=form: {name: _value(model, name, form) for name in named}
        for form in product(_sizes(config)[:1], (False, True), (False,)) if beside else ():
            yield form, lambda form=form: {name: _value(model, name, form) for name in (*named, *beside)}


def _patches(config: Any) -> torch.Tensor:
    """Images as rows of patches."""
    channels = next((c for c in (field(config, n, None) for n in ("in_channels", "in_chans", "num_channels")) if c), 3)
    patch = field(config, "patch_size", 8)
    side = patch if isinstance(patch, int) else patch[0]
    return torch.randn(BATCH, SEQ, channels * field(config, "temporal_patch_size", 1) * side**2)


_MAIN = ("input_ids", "pixel_values", "input_features", "input_values", "hidden_states", "pixel_values_videos")
_BESIDE = ("_mask", "_lengths", "_lens", "encoder_hidden_states", "patch_embeds")  # in part needed after all
_MEL = (
    "num_mel_bins", "num_mel_channels", "feature_size", "input_dim", "model_in_dim", "mel_dim", "n_mels",
    "input_feat_size", "input_feat_per_channel",
)  # fmt: skip
_SOUND = ("input_features", "spectrogram", "mel_spectrogram", "audio_mel")


def _sizes(config: Any) -> list[int]:
    size = field(config, "image_size", 32)
    own = size if isinstance(size, int) else size[0] if isinstance(size, (list, tuple)) else 32
    return list(dict.fromkeys((own, 32, 64, 224)))


def _value(model: nn.Module, name: str, form: Form) -> Any:
    config: Any = model.config
    size, turned, several = form
    if name.startswith(("pixel_values", "input_image")) or name in ("image", "images", "input"):
        if turned and name == "pixel_values":
            return _patches(config)
        frames = (field(config, "num_frames", 2),) if several or name == "pixel_values_videos" else ()
        channels = field(config, "num_channels", field(config, "in_channels", 3))
        return torch.randn(BATCH, *frames, channels if isinstance(channels, int) else 3, size, size)
    if name in (*_SOUND, "input_values", "audio_values") or (several and name == "hidden_states"):
        return _sound(config, name, turned, several)
    if name.endswith("grid_thw"):
        return torch.tensor([[1, 4, 4]] * BATCH)
    if (documented := documented_inputs(model.forward).get(name)) is not None:
        return documented.value(name, config, BATCH, SEQ)
    if name.endswith(("ids", "labels", "index", "codes")):
        return torch.randint(3, max(min(96, field(config, "vocab_size", 96)), 4), (BATCH, SEQ))
    if name.endswith("mask"):
        return torch.ones(BATCH, 4 * SEQ if "feature" in name else SEQ, dtype=torch.long)
    if name.endswith(("lens", "lengths")):
        return torch.full((BATCH,), SEQ)
    width = next((w for w in (field(config, n, None) for n in ("hidden_size", "d_model", "embed_dim")) if w), 32)
    return torch.randn(BATCH, SEQ, width)


def _sound(config: Any, name: str, turned: bool, several: bool) -> torch.Tensor:
    """Waves, or spectra with time first or last, and with a dim of channels."""
    mel = next((w for w in (field(config, n, None) for n in _MEL) if isinstance(w, int)), 16)
    if name in ("input_values", "audio_values") and not several:
        return torch.randn(BATCH, *((1,) if turned else ()), 4000)
    frames = field(config, "max_length", 4 * SEQ) if name == "input_values" else 4 * SEQ
    spectrum = (frames, mel) if turned else (mel, frames)
    return torch.randn(BATCH, *((1,) if several and name in _SOUND else ()), *spectrum)
