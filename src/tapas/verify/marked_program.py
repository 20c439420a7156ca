"""A rank's program whose operators and moves are marked for a recording, under the numbers that they have in the
graph."""

from collections import defaultdict
from collections.abc import Iterator

from torch import fx, nn

from tapas.runtime.moves import Step
from tapas.runtime.recorder import CopyMark, Mark, Marked, MoveMark, OperatorMark, StepRecorder
from tapas.verify.draws import caller, written_block


def mark_program(program: fx.GraphModule, recorder: StepRecorder) -> None:
    """In place. The program's own code stays as it is, as somebody may hold on to it: what it calls is replaced."""
    calls: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if "first" in node.meta:
            calls[str(node.target)].append(node)
    blocks = {id(block): block for nodes in calls.values() for block in [written_block(program, nodes[0])]}
    for name, nodes in calls.items():
        copies = [CopyMark(node.meta["first"]) for node in nodes]
        program.set_submodule(name, Marked(program.get_submodule(name), recorder, copies))
    for block in blocks.values():
        _mark_block(block, recorder)


def _mark_block(block: fx.GraphModule, recorder: StepRecorder) -> None:
    for number, (node, mark) in enumerate(list(_marks(block))):
        called = block.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        assert callable(called)
        block.add_submodule(f"marked_{number}", Marked(called, recorder, [mark]))
        node.op, node.target = "call_module", f"marked_{number}"
    block.recompile()


def _marks(block: fx.GraphModule) -> Iterator[tuple[fx.Node, Mark]]:
    """Calls of a block and what they are: an operator, or a move of what the next operator reads."""
    operators = {caller(node): node.meta["made"].operator for node in block.graph.nodes if "made" in node.meta}
    upcoming = max(operators.values(), default=0)
    marked: list[tuple[fx.Node, Mark]] = []
    for node in reversed(block.graph.nodes):
        if node in operators:
            upcoming = operators[node]
            marked.append((node, OperatorMark(upcoming)))
        elif isinstance(step := _module(block, node), Step):
            marked.append((node, MoveMark(upcoming, step.extra_repr())))
    return reversed(marked)


def _module(block: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return block.get_submodule(str(node.target)) if node.op == "call_module" else None
