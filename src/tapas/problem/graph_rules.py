"""The calls of a folded graph with their rules, and how its blocks hang together: the same on all meshes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, compress
from operator import attrgetter

from tapas.cost.kernels import Fused
from tapas.ir.fold import Folded
from tapas.ir.graph import Op, Tensor
from tapas.problem.fusion import BlockFusion
from tapas.rules.base import Call, Rule, rule_for
from tapas.rules.choices import OperatorChoices, Option, options
from tapas.rules.dim_roles import DimRoles
from tapas.rules.tiling import Divisibility, find_tilings
from tapas.search import Topology, topology_of
from tapas.util import UnionFind


class GraphRules:
    def __init__(self, folded: Folded, compiled: bool = False) -> None:
        self.folded = folded
        self.kinds = UnionFind()  # tensors that stand for the same thing in different copies
        wiring = topology_of(folded.copies)
        for number, places in wiring.read_patterns:
            for name, (source, e) in zip(folded.blocks[number].ports, places, strict=True):
                self.kinds.join(folded.blocks[source].exports[e], name)
        self.all: list[tuple[Op, Call, Rule]] = []
        self.first: list[int] = []  # number of each block's first call
        self.equal: list[int] = []  # for each call the number of the first one that differs in names at most
        numbers: dict[tuple, int] = {}
        for block in folded.blocks:
            self.first.append(len(self.all))
            for op in block.ops:
                call = self._call(op)
                same = numbers.setdefault(_but_for_names(call), len(self.all))
                self.equal.append(same)
                rule = self.all[same][2] if same < len(self.all) else rule_for(call, folded.found)
                self.all.append((self._renamed(op), call, rule))
        self.weights = {name for block in folded.blocks for name in block.weights}
        self.leaving = {(folded.copies[c].block, e): what for (c, e), what in folded.leaving.items()}
        named = set(compress(map(attrgetter("block"), folded.copies), map(attrgetter("path"), folded.copies)))
        self.modules = [b in named for b in range(len(folded.blocks))]  # whether a block is a module
        self.sharing = self._port_copies(wiring)
        self.fused: list[Fused | None] = [None] * len(self.all)  # where operators run together
        self.saves = [rule.saved(call) for _, call, rule in self.all]  # operands and results that are kept
        if compiled:
            self._compile()
        self.kept_ports = self._kept_ports(wiring)  # numbers of ports whose tensors are kept by those who made them
        self.kept: list[tuple[float, ...]] = []  # see _keep
        self.sole: list[tuple[bool, ...]] = []  # whether nobody else keeps it
        self.saved = [self._keep(b) for b in range(len(folded.blocks))]  # what operators keep for the backward pass
        self._options: list[tuple[Divisibility, list[list[Option]]]] = []
        self._lists: dict[int, list[list[Option]]] = defaultdict(list)  # by number of a call: those met so far
        self._choices: dict[tuple[int, int], tuple[Sequence[Option], OperatorChoices]] = {}

    def _renamed(self, op: Op) -> Op:
        kind = self.kinds.find
        return Op(
            op.name,
            op.target,
            tuple(map(kind, op.operands)),
            tuple(map(kind, op.results)),
            op.args,
            op.kwargs,
            op.module,
        )

    def _call(self, op: Op) -> Call:
        call = Call.of(op, self.folded.tensors)

        def by_kind(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
            return tuple(t._replace(name=self.kinds.find(t.name)) for t in tensors)

        return replace(call, operands=by_kind(call.operands), results=by_kind(call.results))

    def _port_copies(self, wiring: Topology) -> list[tuple[int, ...]]:
        """For each port of each block, how many copies read the same tensor (on average)."""
        found: list[tuple[int, ...]] = [()] * len(self.folded.blocks)
        for copy in (wiring.copies[c] for c, _ in wiring.representatives):
            mine = tuple(wiring.reader_counts[place] for place in copy.ports)
            found[copy.block] = tuple(map(min, mine, found[copy.block])) if found[copy.block] else mine
        return found

    def _compile(self) -> None:
        """Let operators run together, as torch.compile has them; blocks are compiled one by one."""
        for number, (block, first) in enumerate(zip(self.folded.blocks, self.first, strict=True)):
            calls = self.all[first : first + len(block.ops)]
            shared = zip(block.ports, self.sharing[number], strict=True)
            ports = {name: self.folded.tensors[name].nbytes / max(copies, 1) for name, copies in shared}
            fusion = BlockFusion(block, calls, self.folded.tensors, frozenset(self.folded.leaf_of), ports)
            self.saves[first : first + len(calls)] = fusion.saved()
            self.fused[first : first + len(calls)] = fusion.traffic()

    def _keep(self, number: int) -> frozenset[str]:
        """Note how much of each operand and result counts as kept by an operator for its backward pass: each tensor
        is kept once, so copies that read the same one bear a part each."""
        block = self.folded.blocks[number]
        known = {block.ports[i] for i in self.kept_ports[number]}
        elsewhere = frozenset(known)
        shared = dict(zip(block.ports, self.sharing[number], strict=True))
        keeping = self.saves[self.first[number] : self.first[number] + len(block.ops)]
        tensors = [(*op.operands, *op.results) for op in block.ops]
        keepers = Counter(chain.from_iterable(map(compress, tensors, keeping)))
        around = {*block.ports, *block.exports}
        for names, flags, (_, _, rule) in zip(tensors, keeping, self.all[self.first[number] :], strict=False):
            asked = any(factor.kernel is not None and factor.kernel.instead is not None for factor in rule.factors)
            self.sole.append(tuple(keepers[name] < 2 and name not in around for name in names) if asked else ())
            shares = []
            for name, needed in zip(names, flags, strict=True):
                needed = needed and name not in known and name not in self.folded.leaf_of
                if needed:
                    known.add(name)
                shares.append(1 / shared.get(name, 1) if needed else 0.0)
            self.kept.append(tuple(shares))
        return frozenset(known) - elsewhere

    def _kept_ports(self, wiring: Topology) -> list[frozenset[int]]:
        """Of each block, ports whose tensors operators of other copies keep that made them: it is one tensor."""
        made = list[set[str]]()
        for block, first in zip(self.folded.blocks, self.first, strict=True):
            flags = zip(block.ops, self.saves[first:], strict=False)
            made.append({name for op, saves in flags if any(saves[len(op.operands) :]) for name in op.results})
        found = [set(range(len(block.ports))) for block in self.folded.blocks]
        for number, places in wiring.read_patterns:
            exports = [self.folded.blocks[source].exports[e] in made[source] for source, e in places]
            found[number] -= {i for i, keeps in enumerate(exports) if not keeps}
        return [frozenset(ports) for ports in found]

    # -- options -----------------------------------------------------------------------------------

    def options(self, mesh: tuple[int, ...]) -> list[list[Option]]:
        """What each call may do along an axis of a mesh; equal calls that may do the same share a list."""
        for divisibility, made in self._options:
            if divisibility.holds_on(mesh):
                return made
        divisibility = Divisibility(mesh)
        self._options.append((divisibility, self._made(divisibility)))
        return self._options[-1][1]

    def _made(self, divisibility: Divisibility) -> list[list[Option]]:
        tilings, _ = find_tilings(self.all, divisibility, self.weights)
        known: dict[tuple, list[Option]] = {}
        found = []
        for (_, call, rule), same, tiling in zip(self.all, self.equal, tilings, strict=True):
            key = same, tuple((name, tuple(some)) for name, some in tiling.items())
            if key not in known:
                known[key] = self._met(same, options(rule, call, tiling, divisibility))
            found.append(known[key])
        return found

    def _met(self, same: int, made: list[Option]) -> list[Option]:
        """The same list as on another mesh, if it has the same options."""
        for other in self._lists[same]:
            if other == made:
                return other
        self._lists[same].append(made)
        return made

    def choices(self, number: int, available: Sequence[Option]) -> OperatorChoices:
        """Some of the options of a call, as a list that is there to stay: on all meshes the same."""
        key = self.equal[number], id(available)
        if key not in self._choices:
            self._choices[key] = available, OperatorChoices(available)
        return self._choices[key][1]

    @cached_property
    def roles(self) -> DimRoles:
        inputs = [leaf.tensor for leaf in self.folded.inputs]
        tensors = {name: self.folded.tensors[name] for name in inputs}
        ranks = {name: len(tensor.shape) for name, tensor in tensors.items()}
        seeds = [((name, 0), "batch") for name in inputs if ranks[name]]
        # tokens, masks, positions; where numbers come in rows these are features
        rows = [name for name in inputs if ranks[name] == 2 and "float" not in tensors[name].dtype]
        seeds += [((name, 1), "sequence") for name in rows]
        return DimRoles([(op, rule) for op, _, rule in self.all], seeds)


def _but_for_names(call: Call) -> tuple:
    tensors = (*call.operands, *call.results)
    names = [t.name for t in tensors]
    facts = tuple((names.index(t.name), t.shape, t.dtype, t.differentiable, t.unpriced) for t in tensors)
    return call.target, repr((call.args, call.kwargs)), facts, len(call.operands)
