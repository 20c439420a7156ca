"""Where a model comes from, as the command line says it: a plan keeps it, so that the model can be made again."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapas.errors import CaptureError, PlanError
from tapas.hardware.cluster_files import cluster_from_dict
from tapas.hardware.mesh import Mesh
from tapas.plan.plan import Plan, load_plan
from tapas.planner.request import Request
from tapas.util import Progress, paused, silent

if TYPE_CHECKING:
    from torch import nn

    from tapas.ir.graph import Graph
    from tapas.models.load import LoadedModel


@dataclass(frozen=True, slots=True)
class ModelSource:
    model: str  # a preset's name, hf:<model_type>, the path of a config.json, or file.py:function
    batch: int | None = None
    seq: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    dtype: str = ""  # "": not said

    def load(self, training: bool | None, device: str = "meta") -> "LoadedModel":
        from tapas.models.load import load_source

        loaded = load_source(self, training is not False, device)
        loaded.check_seq(self.seq)
        return loaded

    @paused
    def capture(
        self, training: bool | None, progress: Progress = silent, check_fold: bool = False
    ) -> "tuple[Graph, Mapping[str, str] | None]":
        """The model's graph, and what transformers says about its parallel plan. A model that returns no loss is
        planned for inference, whether that was said or not."""
        return self.with_graph(training, progress, check_fold)[2:]

    @paused
    def with_graph(
        self, training: bool | None, progress: Progress = silent, check_fold: bool = False
    ) -> "tuple[nn.Module, Any, Graph, Mapping[str, str] | None]":
        """The same, with the model and its inputs before it."""
        progress("load")
        loaded = self.load(training)
        progress("capture")
        from tapas.capture import capture
        from tapas.planner.pipeline import tp_hints

        try:
            graph = capture(loaded.model, loaded.inputs, training=training, name=loaded.name, check_fold=check_fold)
        except CaptureError as error:
            raise self.blamed(error) from error
        return loaded.model, loaded.inputs, graph, tp_hints(loaded.model)

    def blamed(self, error: CaptureError) -> CaptureError:
        """Where TAPAS made the inputs itself, it is not for the user to check them."""
        from tapas.models.load import blamed

        return blamed(error, self.model, self.settings)

    def recorded_in(self, plan: Plan) -> Plan:
        """The plan, which then says where its model comes from."""
        return replace(plan, source={**asdict(self), **plan.source})


def source_of(plan: Plan, place: str) -> tuple[ModelSource, Request]:
    """What a plan was made from."""
    names = {f.name for f in fields(ModelSource)}
    if "model" not in plan.source:
        raise PlanError(place, "does not say which model it was made from", "make it with `tapas plan MODEL -o`")
    mesh = Mesh(tuple(plan.mesh["sizes"]), tuple(plan.mesh["names"]))
    model = {name: value for name, value in plan.source.items() if name in names}
    asked = {name: value for name, value in plan.source.items() if name not in names}
    try:
        return ModelSource(**model), Request.from_dict(asked, mesh, cluster_from_dict(plan.cluster, place))
    except TypeError:
        raise PlanError(place, "its source has unknown fields", "the file is damaged; make the plan again") from None


def saved_plan(model: str) -> Plan | None:
    """The plan, if what was given is the file of one; None for anything that is a model. Both may end in .json."""
    path = Path(model)
    if path.suffix != ".json" or path.is_dir():
        return None
    if not path.exists():
        raise PlanError(model, "no such file", "give a plan that `tapas plan -o` wrote, or a model")
    try:
        data: Any = json.loads(path.read_text())
    except (ValueError, OSError):
        data = {}
    return None if isinstance(data, dict) and "model_type" in data else load_plan(path)
