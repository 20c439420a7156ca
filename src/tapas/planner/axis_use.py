"""What the axes of a mesh do in a plan: batch, sequence or tensor, by the work that is split so."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from tapas.hardware.cluster import Link
from tapas.hardware.mesh import axis_link
from tapas.problem.baselines import batch_of
from tapas.problem.pins import named_variables, role_of
from tapas.problem.problem import OpVariable, Problem, WeightVariable
from tapas.search import Choices, SearchAnswer, count_choices

SHARE = 0.2  # of the work: what an axis does with less of it goes without saying
HARDLY = 0.01  # of the work
PROVEN = 1e-9  # of the cost: the gap of a plan that is the best for sure
NOTHING, TENSOR, BATCH = "nothing", "tensor", "batch"
Amounts = Mapping[int, Counter[str]]  # by axis and word


def axis_words(problem: Problem, choices: Choices) -> Iterable[str]:
    """What each axis splits, most work first; and weights where they are stored in pieces only."""
    work, stored = _work(problem, choices), _stored(problem, choices)
    for axis in range(len(problem.router.mesh.sizes)):
        total = work[axis].total()
        words = [word for word, amount in work[axis].most_common() if amount > SHARE * total]
        pieces = stored[axis]["S"] > stored[axis]["R"] and TENSOR not in words
        yield " + ".join(words or [NOTHING]) + (", weights" if pieces else "")


def tensor_warning(problem: Problem, answer: SearchAnswer, baselines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence where the best plan has no use for tensor parallelism, though there is something to split: then
    whatever else could be split would have to send more over these links than it saves."""
    work = _work(problem, answer.choices)
    axes = [axis for axis, n in enumerate(problem.router.mesh.sizes) if n > 1]
    others = [work[a].total() - work[a][BATCH] - work[a][NOTHING] for a in axes]
    if not axes or any(o > HARDLY * work[a].total() for o, a in zip(others, axes, strict=True)):
        return []
    if not _splittable(problem):
        return []
    dealt = any(work[a][BATCH] > HARDLY * work[a].total() for a in axes)
    what = "every matrix product on the batch only" if dealt else "no matrix product at all"
    links = dict.fromkeys(axis_link(problem.router.cluster, problem.router.mesh, a) for a in axes)
    megatron = baselines.get("megatron", {}).get("ratio")
    than = f"; megatron takes {megatron:.3g} times as long" if megatron and megatron > 1 else ""
    fact = "cannot pay" if answer.gap <= PROVEN * answer.cost else "does not seem to pay"
    where = f"with links of {_speeds(links)} and operators as short as these"
    return [f"tensor parallelism {fact} {where}: the best plan splits {what}{than}"]


def uneven_batch(problem: Problem, choices: Choices) -> list[str]:
    """A sentence where products deal the batch out over axes that it does not divide over."""
    mesh, batch = problem.router.mesh, batch_of(problem)
    over = set[int]()
    for (block, own), _ in count_choices(problem.wiring, choices).items():
        for variable, choice in zip(problem.blocks[block].variables, own, strict=True):
            if isinstance(variable, OpVariable) and variable.rule.flops:
                role, options = role_of(problem, variable), variable.table.choice(choice).options
                axes = [axis for axis, option in enumerate(options) if role(option) == BATCH]
                over |= set(axes) if batch % prod(mesh.sizes[a] for a in axes) else set()
    if batch < 2 or not over:
        return []
    alone = [axis for axis in sorted(over) if batch % mesh.sizes[axis]]
    sizes = (" or " if alone else " x ").join(f"{mesh.names[a]} = {mesh.sizes[a]}" for a in alone or sorted(over))
    return [f"a batch of {batch} does not divide over {sizes}: the device with most samples sets the pace"]


def _speeds(links: Iterable[Link]) -> str:
    return " and ".join(f"{link.bytes_per_s / 1e9:.3g} GB/s" for link in links)


def _splittable(problem: Problem) -> bool:
    """Whether a product could split something else than the batch."""
    products = [
        s for s in named_variables(problem).values() if isinstance(s.variable, OpVariable) and s.variable.rule.flops
    ]
    return any(
        option.factor is not None and site.role(option) != BATCH
        for site in products
        if isinstance(site.variable, OpVariable)
        for option in site.variable.table.options
    )


def _work(problem: Problem, choices: Choices) -> Amounts:
    """Nanoseconds of products by what they split."""
    found: Amounts = defaultdict(Counter)
    for (block, own), times in count_choices(problem.wiring, choices).items():
        for variable, choice in zip(problem.blocks[block].variables, own, strict=True):
            if isinstance(variable, OpVariable) and variable.rule.flops:
                role = role_of(problem, variable)
                amount = round(1e9 * times * float(variable.table.seconds[choice]))
                for axis, option in enumerate(variable.table.choice(choice).options):
                    word = role(option) or (TENSOR if option.factor else NOTHING)
                    found[axis][word] += amount
    return found


def _stored(problem: Problem, choices: Choices) -> Amounts:
    """Elements of weights by whether they are split."""
    found: Amounts = defaultdict(Counter)
    for (block, own), times in count_choices(problem.wiring, choices).items():
        for variable, choice in zip(problem.blocks[block].variables, own, strict=True):
            if isinstance(variable, WeightVariable):
                for axis, state in enumerate(variable.space.layout(int(variable.stored[choice]))):
                    found[axis]["S" if state.sharded else "R"] += times * variable.tensor.elements
    return found
