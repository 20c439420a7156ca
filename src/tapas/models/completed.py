"""Inputs that a model turns out to need: where a statement fails that reads one that it was not given, it is added."""

import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

MOST = 8  # inputs that are added
_LAST = {"inputs_embeds", "position_ids"}  # while there is another way
_NEVER = re.compile(r"labels$|past_key_values|cache|_outputs$|^output_|^return_|^use_")


def completed(model: nn.Module, inputs: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """The inputs, and a value of each that is asked for besides, as the model runs with them; or as it fails."""
    accepted = inspect.signature(model.forward).parameters
    for _ in range(MOST):
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as error:  # whatever a model says when something is not there
            name = next(_asked(error, accepted.keys() - inputs.keys()), None)
            if name is None:
                raise
            inputs = {**inputs, name: value(name)}
    with torch.no_grad():
        model(**inputs)
    return inputs


def _asked(error: Exception, missing: Collection[str]) -> Iterator[str]:
    """Those that an error names, and those that the statements name where it was raised and that are None there."""
    words = _words(str(error))
    if "required positional" in str(error):
        yield from (word for word in words if word in missing)
    if "labels" in words:
        yield from sorted(name for name in missing if name.endswith("_labels"))
    frames = reversed([*traceback.walk_tb(error.__traceback__)])
    read = [(f.f_locals, _words(linecache.getline(f.f_code.co_filename, number))) for f, number in frames]
    words += [word for scope, said in read for word in said if scope.get(word, scope) is None]
    found = [word for word in dict.fromkeys(words) if word in missing and not _NEVER.search(word)]
    yield from sorted(found, key=lambda word: word in _LAST)


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text)))
