"""An fx graph as it is written, with the modules it calls."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn


class Draft:
    def __init__(self) -> None:
        self.root, self.graph = nn.Module(), fx.Graph()
        self.names: dict[nn.Module, str] = {}
        self.last: fx.Node | None = None  # of the arguments

    def placeholder(self, name: str) -> fx.Node:
        """Arguments come first, in the order in which they are asked for."""
        with self.graph.inserting_after(self.last) if self.last else self.graph.inserting_before():
            self.last = self.graph.placeholder(name)
        return self.last

    def module(self, called: nn.Module, *args: Any, **kwargs: Any) -> fx.Node:
        """A module is added once, however often it is called."""
        if called not in self.names:
            self.names[called] = f"{type(called).__name__.lower()}_{len(self.names)}"
            self.root.add_module(self.names[called], called)
        return self.graph.call_module(self.names[called], args, kwargs)

    def unpacked(self, node: fx.Node, count: int) -> list[fx.Node]:
        return [self.graph.call_function(operator.getitem, (node, i)) for i in range(count)]

    def finished(self, values: Sequence[fx.Node], name: str) -> fx.GraphModule:
        self.graph.output(tuple(values))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, name)
