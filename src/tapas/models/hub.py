"""Models of transformers from their config classes, on the meta device unless weights are asked for."""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tapas.errors import TapasError, nearest
from tapas.models.inputs import example_inputs, field
from tapas.models.settings import merge, nested

# First match wins: a model of several tasks is planned for the one it was made for.
_TASKS = (
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    ("masked", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("image-text", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("contrastive", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING"),
    ("classification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
    ("ctc", "MODEL_FOR_CTC_MAPPING"),
    ("classification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING"),
    ("classification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    ("segmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING"),
    ("detection", "MODEL_FOR_OBJECT_DETECTION_MAPPING"),
    ("instances", "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING"),
    ("detection", "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING"),
    ("forecast", "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING"),
    ("none", "MODEL_MAPPING"),
)


OWN_FILE = "write a function that returns the model and example inputs, and give file.py:function"


def library() -> Any:
    try:
        import transformers
    except ImportError:
        raise TapasError(
            "transformers", "it is not installed, and this model needs it", "pip install 'tapas-parallel[hf]'"
        ) from None
    return transformers


def config_of_type(place: str, model_type: str, fields: Mapping[str, Any], settings: Mapping[str, str]) -> Any:
    """The config of a model type: `fields` over its defaults, `settings` over both."""
    mapping = library().CONFIG_MAPPING
    if not model_type:
        raise TapasError(
            place.rstrip(":"), "it does not say which model type", "write e.g. hf:llama, hf:bert or hf:vit"
        )
    if model_type not in mapping:
        near = nearest(model_type, sorted(mapping.keys()))
        if not near.startswith("did you mean"):  # there are hundreds
            near = "write a type as a config.json says it, such as llama, bert or vit"
        raise TapasError(place, f"transformers has no model type {model_type}", near)
    cls = mapping[model_type]
    with quiet():
        made = _made(place, cls, dict(fields))
        if settings:
            made = _made(place, cls, merge(fields, nested(place, settings, made)))
    return made


def config_of_file(path: Path, settings: Mapping[str, str]) -> Any:
    place = str(path)
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise TapasError(
            place, f"cannot be read: {error.strerror}", "give the path of a transformers config.json"
        ) from None
    except ValueError as error:
        raise TapasError(place, f"is not JSON: {error}", "give a transformers config.json") from None
    if isinstance(fields, dict) and {"version", "mesh", "operators"} <= fields.keys():
        remedy = f"`tapas show {place}` prints it; `tapas explain` and `tapas verify` take it, too"
        raise TapasError(place, "is a plan, not a model", remedy)
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise TapasError(place, "has no model_type", "give a config.json as transformers writes it")
    fields = {
        key: value for key, value in fields.items() if key not in ("transformers_version", "torch_dtype", "dtype")
    }
    model_type = fields.pop("model_type")
    layers = settings.get("num_hidden_layers")
    if layers is not None and layers.isdigit() and isinstance(fields.get("layer_types"), list):
        fields["layer_types"] = fields["layer_types"][: int(layers)]  # one for each layer there will be
    return config_of_type(place, model_type, fields, settings)


def build(place: str, config: Any, dtype: torch.dtype, training: bool, device: str = "meta") -> tuple[Any, str]:
    """The model with a loss for its config, on the meta device without weights, and its task."""
    task, cls = _task(place, config)
    if task in ("seq2seq", "speech") and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if getattr(config, "use_cache", False):
        config.use_cache = False
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # unlike model.to(dtype) this leaves alone what a model wants in float32
    try:
        with torch.device(device), quiet():
            model = cls(config)
    except ImportError as error:
        raise TapasError(
            place, f"{cls.__name__} cannot be made: {_sentence(error)}", f"install that library, or {OWN_FILE}"
        ) from error
    except Exception as error:  # a config may be wrong in any way: say which and why
        raise TapasError(
            place, f"{cls.__name__} cannot be made: {_line(error)}", f"change its fields with --set, or {OWN_FILE}"
        ) from error
    finally:
        torch.set_default_dtype(before)
    return model.train(training), task


def inputs_for(place: str, model: Any, task: str, batch: int, seq: int | None, training: bool) -> dict[str, Any]:
    limit = _positions(model.config)
    if seq is None:
        seq = min(512, limit) if limit else 512
    elif limit and seq > limit and not _rotary(model.config):
        raise TapasError(place, f"seq {seq} is beyond its {limit} positions", f"use --seq {limit} or fewer")
    before = torch.get_default_dtype()
    torch.set_default_dtype(next(model.parameters()).dtype)
    try:
        return example_inputs(model, task, batch, seq, training)
    finally:
        torch.set_default_dtype(before)


def has_sequence(model: Any, task: str, training: bool) -> bool:
    """Whether the length of a sample changes the model's inputs."""
    short, longer = (example_inputs(model, task, 1, seq, training) for seq in (1, 2))
    return any(isinstance(v, torch.Tensor) and v.shape != longer[k].shape for k, v in short.items())


def _task(place: str, config: Any) -> tuple[str, Any]:
    from transformers.models.auto import modeling_auto

    named = (config.architectures or [None])[0]
    found: list[tuple[str, Any]] = []
    for task, mapping in _TASKS:
        table = getattr(modeling_auto, mapping, {})
        if type(config) in table:
            cls = table[type(config)]
            found += [(task, c) for c in (cls if isinstance(cls, tuple) else (cls,))]
    for task, cls in found:
        if cls.__name__ == named:
            return task, cls
    if [task for task, _ in found] == ["none"]:  # forecasts of some have no mapping
        name = f"{type(config).__name__.removesuffix('Config')}ForPrediction"
        found = [("forecast", cls) for cls in [getattr(library(), name, None)] if cls is not None] + found
    for task, cls in found:
        if task != "contrastive" or "return_loss" in inspect.signature(cls.forward).parameters:
            return task, cls
    if (part := _part(config)) is not None:
        return "none", part
    raise TapasError(
        place, f"transformers has no model with a known task for {type(config).__name__}",
        OWN_FILE,
    )  # fmt: skip


def _part(config: Any) -> Any:
    """The model of a config that is a part of others' and that no task is known for: the last of its file, which calls
    those before it. Some are no models of their own, but modules that are made from nothing but the config."""
    file = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        classes: list[Any] = [cls for cls in vars(import_module(file)).values() if inspect.isclass(cls)]
    except ImportError:
        return None
    own = [cls for cls in classes if cls.__module__ == file and "PreTrained" not in cls.__name__]
    models = [cls for cls in own if issubclass(cls, library().PreTrainedModel)]
    found = [cls for cls in models if cls.config_class is type(config)]
    made_from = [cls for cls in own if issubclass(cls, torch.nn.Module) and _is_made_from(cls, type(config))]
    named = [cls for cls in made_from if cls.__name__.removesuffix("Model") == _name(config).removesuffix("Model")]
    return next((cls for cls in (*reversed(found), *named) if _INPUTS & set(_parameters(cls.forward))), None)


_INPUTS = {
    "input_ids", "pixel_values", "input_features", "input_values", "hidden_states", "inputs_embeds", "spectrogram",
    "mel_spectrogram", "flattened_patches", "patch_embeds", "audio_input_ids", "image_features", "context",
}  # fmt: skip


def _name(config: Any) -> str:
    return type(config).__name__.removesuffix("Config")


def _is_made_from(cls: Any, config: type) -> bool:
    """Whether its constructor takes such a config, and nothing else."""
    given = [*_parameters(cls.__init__).values()][1:]
    wanted = [p for p in given if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(wanted) == 1 and wanted[0].annotation in (config, config.__name__)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _made(place: str, cls: Any, fields: dict[str, Any]) -> Any:
    try:
        return cls(**fields)
    except Exception as error:  # transformers validates in many ways
        raise TapasError(
            place, f"{cls.__name__} refuses its fields: {_line(error)}", "change the fields it names"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _sentence(error: Exception) -> str:
    """transformers adds how to install and to restart."""
    return _line(error).partition(". ")[0]


def _positions(config: Any) -> int:
    found = field(config, "max_position_embeddings", 0)
    return found if isinstance(found, int) else 0


def _rotary(config: Any) -> bool:
    """Positions that are computed, not looked up, have no hard end."""
    return bool(getattr(config, "rope_parameters", None)) or hasattr(config, "relative_attention_num_buckets")


@contextmanager
def quiet() -> Iterator[None]:
    logging = library().utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
