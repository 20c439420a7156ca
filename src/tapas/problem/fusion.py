"""What compiled kernels leave out of memory.

torch.compile makes one kernel of operators that follow each other and are no products: what they hand to each other
is never written down. And its backward pass computes again what is cheap instead of keeping it: what is kept is a
minimum cut, as large as the tensors are before they are split, between what only products and the like make or read
and what the backward pass needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tapas.cost.kernels import Fused
from tapas.ir.fold import Block
from tapas.ir.graph import Op, Tensor
from tapas.rules.base import Call, Rule
from tapas.util import UnionFind

# Families of which one kernel is made; others are called as they are.
FUSIBLE = {
    "pointwise", "strided", "narrowing", "widening", "concatenation", "reduction", "norm", "batch_norm", "softmax",
    "cross_entropy",
}  # fmt: skip
LONG = "cross_entropy"  # its rows are too long to be held: both passes read them once more
Flags = tuple[bool, ...]  # of an operator's operands and results


def fusible(call: Call, rule: Rule) -> bool:
    plain = not (rule.view or rule.flops or rule.missing or rule.own_gradient or rule.resident is not None)
    return plain and rule.kernels_of in FUSIBLE and call.target.startswith("aten.")


@dataclass(frozen=True)
class BlockFusion:
    """Of one block, which is compiled by itself. Tensors that are views of each other count as one, named by its
    root."""

    block: Block
    calls: Sequence[tuple[Op, Call, Rule]]
    tensors: Mapping[str, Tensor]
    leaves: frozenset[str]  # weights, inputs and constants are there anyway
    port_bytes: Mapping[str, float]  # what keeping the tensor of a port takes

    @cached_property
    def ops(self) -> list[tuple[Op, Call, Rule]]:
        return [(op, call, rule) for op, (_, call, rule) in zip(self.block.ops, self.calls, strict=True)]

    @cached_property
    def fused(self) -> list[tuple[Op, Call]]:
        return [(op, call) for op, call, rule in self.ops if fusible(call, rule)]

    @cached_property
    def alone(self) -> list[tuple[Op, Call, Rule]]:
        """Operators that are kernels of their own."""
        return [(op, call, rule) for op, call, rule in self.ops if not rule.view and not fusible(call, rule)]

    @cached_property
    def roots(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for op, _, rule in self.ops:
            if rule.view and op.operands:
                found |= dict.fromkeys(op.results, found.get(op.operands[0], op.operands[0]))
        return found

    def root(self, name: str) -> str:
        return self.roots.get(name, name)

    @cached_property
    def kernels(self) -> dict[str, str]:
        """The kernel that makes each result of a fusible operator: those belong to one between which no operator
        stands that is a kernel of its own."""
        joined, turn = UnionFind(), dict[str, int]()  # after so many that are kernels of their own, one after the other
        made = {name for op, _ in self.fused for name in op.results}
        for op, _, rule in self.ops:
            before = [self.root(name) for name in op.operands]
            now = max((turn.get(name, 0) for name in before), default=0)
            for name in op.results if made.issuperset(op.results) else ():
                joined.join(op.results[0], name)
                for operand in before:
                    if operand in made and turn[operand] == now:
                        joined.join(operand, name)
            turn |= dict.fromkeys(op.results, now + (not rule.view and made.isdisjoint(op.results)))
        return {name: joined.find(name) for name in made}

    # ------------------------------------------------------------------------------ what is kept

    @cached_property
    def needed(self) -> dict[str, list[tuple[int, int]]]:
        """What the backward pass needs, with who needs it: numbers of an operator and of its operand or result."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, (op, call, rule) in enumerate(self.ops):
            for place, (name, flag) in enumerate(zip((*op.operands, *op.results), rule.saved(call), strict=True)):
                if flag and self.leaves.isdisjoint((name, self.root(name))):
                    found.setdefault(self.root(name), []).append((number, place))
        return found

    def kept(self) -> set[str]:
        """The tensors that are kept: all that is needed can be computed from them."""
        import networkx  # torch brings it, and cuts its own graphs with it

        graph, source, sink = networkx.DiGraph(), "source", "sink"
        graph.add_nodes_from((source, sink))
        sizes = dict(self.port_bytes)
        again = {name: op for op, _ in self.fused for name in op.results}  # what is computed again if it is not kept
        for op, call, rule in self.alone:  # what these keep would have to be written once more
            sizes |= {name: float(self.tensors[name].nbytes) for name in op.results}
            kept = zip(map(self.root, op.operands), rule.saved_operands(call), strict=True)
            sizes |= {name: float(self.tensors[name].nbytes) for name, flag in kept if flag and name in again}
        for name in sizes:
            graph.add_edge(source, (name, "made"))
        for name in (*sizes, *again):
            graph.add_edge((name, "made"), (name, "kept"), capacity=sizes.get(name, float(self.tensors[name].nbytes)))
        for name, op in again.items():
            for operand in {self.root(o) for o in op.operands} - self.leaves:
                graph.add_edge((operand, "kept"), (name, "made"))
        for name in self.needed:
            graph.add_edge((name, "kept"), sink)
        _, (reached, _) = networkx.minimum_cut(graph, source, sink)
        return {name for name, side in reached - {source} if side == "made" and (name, "kept") not in reached}

    def saved(self) -> list[Flags]:
        """By operator: which of its operands and results are kept on its account."""
        flags: list[list[bool]] = []
        for op, call, rule in self.ops:
            names = *op.operands, *op.results
            flags.append([flag and name in self.leaves for name, flag in zip(names, rule.saved(call), strict=True)])
        for name in self.kept():
            for number, place in self.needed.get(name) or self._readers(name)[:1]:
                flags[number][place] = True
        return [tuple(some) for some in flags]

    def _readers(self, name: str) -> list[tuple[int, int]]:
        """Numbers of operators, and of their operands."""
        operands = [
            (n, place, operand) for n, (op, _, _) in enumerate(self.ops) for place, operand in enumerate(op.operands)
        ]
        return [(number, place) for number, place, operand in operands if self.root(operand) == name]

    # ------------------------------------------------------------------------- what is read and written

    @cached_property
    def leaving(self) -> set[str]:
        """What other kernels read, or other blocks."""
        found = set(map(self.root, self.block.exports))
        for op, _, _ in self.alone:
            found.update(map(self.root, op.operands))
        for op, _ in self.fused:
            here = self.kernels[op.results[0]]
            found.update(name for name in map(self.root, op.operands) if self.kernels.get(name) != here)
        return found

    def traffic(self) -> list[Fused | None]:
        """By operator; None: it is a kernel of its own, or none at all."""
        read, found = set[tuple[str, str]](), list[Fused | None]()
        together = {id(op) for op, _ in self.fused}
        for op, call, rule in self.ops:
            if id(op) not in together:
                found.append(None)
                continue
            here, trained = self.kernels[op.results[0]], any(t.priced for t in call.operands)
            ahead, back = list[float](), list[float]()
            for name, tensor in zip((*op.operands, *op.results), (*call.operands, *call.results), strict=True):
                root, made = self.root(name), name in op.results
                first = self.kernels.get(root) != here and (here, root) not in read
                read.add((here, root))
                ahead.append(float(root in self.leaving if made else first))
                passes = tensor.priced + (not made and root in self.needed)
                back.append(ahead[-1] * passes if trained else 0.0)
            if rule.kernels_of == LONG:
                ahead[0], back[0] = ahead[0] + 1, back[0] + 2 * trained
            if any(t.priced and t.elements < call.results[0].elements for t in call.operands):
                back[0], back[-1] = back[0] + 1, back[-1] + 1  # a gradient is summed up, which is a pass by itself
            found.append(Fused(tuple(ahead), tuple(back), any(self.root(name) in self.leaving for name in op.results)))
        return found
