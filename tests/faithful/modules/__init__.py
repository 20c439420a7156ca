"""All cases, by family. Importing this package registers them."""

from tests.faithful.case import CASES
from tests.faithful.modules import (
    adversarial,
    attention,
    convolution,
    experts,
    functions,
    graphs,
    inputs,
    known,
    losses,
    outputs,
    probabilistic,
    quantised,
    recommender,
    recurrent,
    regions,
    state,
    transformers,
    tricks,
    user,
)

__all__ = [
    "CASES", "adversarial", "attention", "convolution", "experts", "functions", "graphs", "inputs", "known", "losses",
    "outputs", "probabilistic", "quantised", "recommender", "recurrent", "regions", "state", "transformers", "tricks",
    "user",
]  # fmt: skip
