"""Problems of real models, and the optima of their integer programs that are kept in tests/golden/optima.json.

Sizes are those of real models, so that splitting pays; depth is cut to a few layers. HiGHS needs minutes for all of
them, so `make test` compares with what is kept and `make test-full` solves them again. After a change of costs:

    python -m tests.oracle.optima
"""

import json
from functools import cache, lru_cache
from itertools import product
from pathlib import Path

from tapas.capture import capture
from tapas.cost.collectives import ClusterRouter
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import parse_mesh
from tapas.ir.fold import fold
from tapas.ir.graph import Graph
from tapas.models.load import load
from tapas.planner.fit import search
from tapas.planner.solution import Solution
from tapas.problem.build import build_problem
from tapas.problem.pins import pin_mode
from tapas.problem.problem import KEEP, Problem
from tapas.search import Network
from tests.oracle.highs import optimum

GOLDEN = Path(__file__).parents[1] / "golden"
CLUSTER = load_cluster(GOLDEN / "cluster.toml")
# name -> preset, batch, sequence, settings
MODELS: dict[str, tuple[str, int, int | None, dict[str, str]]] = {
    "gpt2": ("gpt2-xl", 16, 512, {"n_layer": "2"}),
    "llama": ("llama3-8b", 16, 512, {"num_hidden_layers": "3"}),
    "bert": ("bert-large", 16, 512, {"num_hidden_layers": "2"}),
    "t5": ("t5-large", 16, 512, {"num_layers": "3"}),
    "vit": ("vit-h14", 16, None, {"num_hidden_layers": "2"}),
    "mixtral": ("mixtral-8x7b", 16, 512, {"num_hidden_layers": "2"}),
    "resnet": ("resnet50-100k", 256, None, {"depths": "[1, 3, 1, 3]"}),
}
MESHES = ("4", "8", "2x4", "2x2x2")


@cache
def graph(name: str, training: bool) -> Graph:
    source, batch, seq, settings = MODELS[name]
    loaded = load(source, batch=batch, seq=seq, settings=settings, training=training)
    return capture(loaded.model, loaded.inputs, training=training, name=name)


def every_choice(part: Problem) -> Network:
    """All there is to choose but for computing activations again: without a limit, that never pays."""
    return part.network(pin_mode(part, KEEP))


@lru_cache(maxsize=4)
def problem(name: str, training: bool, mesh: str) -> Problem:
    return build_problem(fold(graph(name, training)), ClusterRouter(parse_mesh(mesh), CLUSTER))


@lru_cache(maxsize=4)
def solution(name: str, training: bool, mesh: str) -> Solution:
    return search(problem(name, training, mesh))


def solved(name: str, training: bool, mesh: str) -> float:
    """The integer program's optimum; with three axes it takes the search's answer to rule most choices out."""
    network = every_choice(problem(name, training, mesh))
    if mesh.count("x") < 2:
        return optimum(network).cost
    return optimum(network, seconds=3600, known=solution(name, training, mesh).answer.cost).cost


def entry(name: str, training: bool, mesh: str) -> str:
    return f"{name} {'training' if training else 'inference'} {mesh}"


@cache
def stored_optima() -> dict[str, float]:
    return json.loads((GOLDEN / "optima.json").read_text())["seconds"]


def write() -> None:
    how = "python -m tests.oracle.optima: the optimum of every integer program by HiGHS, on the cluster of cluster.toml"
    seconds = {}
    for name, training, mesh in product(MODELS, (True, False), MESHES):
        seconds[entry(name, training, mesh)] = solved(name, training, mesh)
        print(entry(name, training, mesh), seconds[entry(name, training, mesh)], flush=True)
    (GOLDEN / "optima.json").write_text(json.dumps({"made": how, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    write()
