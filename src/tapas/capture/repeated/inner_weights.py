"""Buffers that are weights to repeated submodules, where these do not hold them alone: all readers have to agree."""

from collections.abc import Mapping
from dataclasses import replace

from tapas.capture.leaves import LiftedInputs, ModelState
from tapas.capture.repeated.body_program import BodyProgram
from tapas.capture.repeated.dry_run import CannotFold
from tapas.capture.repeated.session import CopyKind, Session
from tapas.capture.weight_buffers import as_parameters


def with_inner_weights(
    leaves: LiftedInputs, session: Session, programs: Mapping[CopyKind, BodyProgram], state: ModelState
) -> LiftedInputs:
    """Also the buffers that are weights to blocks, of those that a block does not hold alone."""
    weights = {leaf.tensor for leaf in leaves.leaves if leaf.kind == "parameter"} & state.buffers.keys()
    others: set[str] = set()
    for called in session.calls:
        if called.path not in state.members:
            held = called.kind.member.structure.buffers
            for leaf in programs[called.kind].leaves:
                if leaf.paths[0] in held:
                    name = state.paths(f"{called.path}.{leaf.paths[0]}")[0]
                    (weights if leaf.kind == "parameter" else others).add(name)
    if not weights.isdisjoint(others):
        raise CannotFold("a buffer is a weight to one block, and none to another")
    return replace(leaves, leaves=as_parameters(leaves.leaves, weights))
