"""`--set field=value`: text to a value of the field's type, and unknown fields refused."""

import ast
from collections.abc import Mapping
from typing import Any

from tapas.errors import TapasError, nearest


def parse(place: str, field: str, text: str, current: Any) -> Any:
    """`text` as a value like the field's present one."""
    if not isinstance(text, str):
        return text
    if isinstance(current, str):
        return text
    try:
        value = ast.literal_eval(
            {"true": "True", "false": "False", "none": "None", "null": "None"}.get(text.lower(), text)
        )
    except (ValueError, SyntaxError):
        if current is None:
            return text
        raise TapasError(place, f"{field}={text} is not of type {type(current).__name__}", f"now {current!r}") from None
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    fits = current is None or value is None or isinstance(value, type(current)) or isinstance(current, (list, tuple))
    if not fits or (isinstance(value, bool) and not isinstance(current, (bool, type(None)))):
        raise TapasError(place, f"{field}={text} is not of type {type(current).__name__}", f"now {current!r}")
    if isinstance(current, int) and current > 0 and isinstance(value, int) and value < 0:
        raise TapasError(place, f"{field}={text} is negative", f"now {current!r}")
    return value


def nested(place: str, settings: Mapping[str, str], defaults: Any) -> dict[str, Any]:
    """Settings as keyword arguments of a config class; `text_config.num_hidden_layers` goes one level down."""
    made: dict[str, Any] = {}
    for path, text in settings.items():
        target, config = made, defaults
        *parents, field = path.split(".")
        for parent in parents:
            config = _member(place, config, parent, path)
            target = target.setdefault(parent, {})
        current = _member(place, config, field, path)
        target[_canonical(config, field)] = parse(place, path, text, current)
    return made


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` over `base`, level by level."""
    merged = dict(base)
    for key, value in extra.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def _canonical(config: Any, field: str) -> str:
    """GPT-2 says n_layer for num_hidden_layers: one name, or the two would fight."""
    return getattr(config, "attribute_map", {}).get(field, field)


def _member(place: str, config: Any, field: str, path: str) -> Any:
    known = config if isinstance(config, Mapping) else {**getattr(config, "attribute_map", {}), **vars(config)}
    if field.startswith("_") or (field not in known and not _property(config, field)):
        names = sorted(name for name in known if not name.startswith("_"))
        raise TapasError(place, f"its configuration has no field {path}", nearest(field, names))
    return config[field] if isinstance(config, Mapping) else getattr(config, field)


def _property(config: Any, field: str) -> bool:
    """Fields such as num_labels are properties of the class."""
    return isinstance(getattr(type(config), field, None), property)
