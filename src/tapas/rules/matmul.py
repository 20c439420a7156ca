"""Products of matrices: linear, mm, bmm, matmul, addmm, einsum, ..."""

from dataclasses import replace

from tapas.ir.graph import Ref, refs
from tapas.rules.base import Call, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, broadcast, from_labels, names


def product(call: Call, terms: list[Term], result: Term, added: int | None = None, **options) -> Rule:
    """Contractions count a multiplication and an addition a point. What is added (a bias) must be added
    once, not once a rank: where the sum is split, `added` is a partial sum as well."""
    kernels = {}
    if added is not None:
        present = {label for dim in (*terms[added], *result) for label in dim}
        override = tuple("P" if i == added else None for i in range(len(terms)))
        kernels = {
            label: Kernel(operands=override) for t in terms for dim in t for label in dim if label not in present
        }
    summed = {label for t in terms for dim in t for label in dim} - {label for dim in result for label in dim}
    products = PRODUCTS if summed - {"1"} else ()  # else it comes down to a pointwise product
    return from_labels(terms, [result], call, kernels=kernels, flops=2.0, products=products, **options)


WORDS = Wording(factors={"n": "output features", "k": "input features", "m": "rows"})
# what they come down to
PRODUCTS = tuple(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm")
)


@rule("aten.linear.default", wording=WORDS)
def linear(call: Call) -> Rule:
    batch = names(len(call.operands[0].shape) - 1)
    terms: list[Term] = [[*batch, ["k"]], [["n"], ["k"]] if len(call.operands[1].shape) == 2 else [["k"]]]
    result: Term = [*batch, *terms[1][:-1]]
    if len(call.operands) == 2:
        return product(call, terms, result, linear=((0,),))  # weights are never partial sums
    return product(call, [*terms, terms[1][:-1]], result, added=2, linear=((0, 2),))


@rule("aten.mv.default", "aten.dot.default", "aten.vdot.default")
@rule("aten.mm.default", wording=WORDS)
@rule("aten.bmm.default", "aten.matmul.default", wording=replace(WORDS, listed=True))
def matmul(call: Call) -> Rule:
    left, right = (call.operands[call.args[i].index].shape for i in (0, 1))
    one, two = _matmul_terms(left, right, call.results[0].shape)
    result = [*names(_batch(left, right)), *one[1], *two[1]]
    # torch multiplies a row by a matrix as two matrices, and then changes the shape of the result in place
    made = product(call, [one[0], two[0]], result, linear=((0,), (1,)))
    return replace(made, products=()) if len(left) == 1 and len(right) > 1 else made


def _batch(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return max(len(left) - 2, len(right) - 2, 0)


def _matmul_terms(left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]):
    """Labels of both operands, each with the labels it alone gives to the result."""
    batch = result[: _batch(left, right)]
    rows: Term = [["m"]] if len(left) > 1 else []
    columns: Term = [["n"]] if len(right) > 1 else []
    one = [*broadcast(left[:-2], batch), *rows, ["k"]]
    two = [*broadcast(right[:-2], batch), ["k"], *columns]
    return (one, rows), (two, columns)


@rule("aten.outer.default", "aten.ger.default")
def outer(call: Call) -> Rule:
    return product(call, [[["m"]], [["n"]]], [["m"], ["n"]], linear=((0,), (1,)))


@rule("aten.addmv.default", "aten.addbmm.default")
@rule("aten.addmm.default", "aten.baddbmm.default", wording=WORDS)
def addmm(call: Call) -> Rule:
    terms: dict[str, list[Term]] = {
        "addmm": [[["m"], ["k"]], [["k"], ["n"]], [["m"], ["n"]]],
        "baddbmm": [[["b"], ["m"], ["k"]], [["b"], ["k"], ["n"]], [["b"], ["m"], ["n"]]],
        "addmv": [[["m"], ["k"]], [["k"]], [["m"]]],
        "addbmm": [[["b"], ["m"], ["k"]], [["b"], ["k"], ["n"]], [["m"], ["n"]]],
    }
    one, two, result = terms[call.target.split(".")[1]]
    shape, whole = call.operands[0].shape, call.results[0].shape
    bias = [r if size == full else ["1"] for r, size, full in zip(
        result[len(result) - len(shape) :], shape, whole[len(whole) - len(shape) :], strict=True
    )]  # fmt: skip
    return product(call, [bias, one, two], result, added=0, linear=((0, 1),))


@rule("aten.einsum.default", wording=Wording(listed=True))
def einsum_operator(call: Call) -> Rule:
    """The labels are the equation's own; `...` stands for as many leading labels as fit."""
    equation = call.args[0].replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    operands = [call.operands[i] for i in refs(call.args[1])]
    ellipsis = max(len(t.shape) - len(e.replace("...", "")) for e, t in zip(inputs.split(","), operands, strict=True))
    letters = [c for c in inputs.replace("...", "") if c != ","]
    if not arrow:
        output = "..." * ("..." in inputs) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    whole = call.results[0].shape

    def expand(term: str, shape: tuple[int, ...]) -> Term:
        before, dots, after = term.partition("...")
        count = len(shape) - len(before) - len(after) if dots else 0
        many = [[f"e{i}"] for i in range(ellipsis - count, ellipsis)]
        return [*([c] for c in before), *many, *([c] for c in after)]

    terms = [expand(term, t.shape) for term, t in zip(inputs.split(","), operands, strict=True)]
    result = expand(output, whole)
    largest: dict[str, int] = {}
    twice = {c for term in inputs.split(",") for c in term if term.count(c) > 1 and c != "."}  # a diagonal
    for term, t in zip([*terms, result], [*operands, call.results[0]], strict=True):
        for dim, size in zip(term, t.shape, strict=True):
            largest[dim[0]] = max(size, largest.get(dim[0], 1))

    def place(term: Term, shape: tuple[int, ...]) -> Term:
        named = [["1"] if size != largest[d[0]] else d for d, size in zip(term, shape, strict=True)]
        return [["!" + d[0]] if d[0] in twice else d for d in named]

    placed = [place(term, t.shape) for term, t in zip(terms, operands, strict=True)]
    # the same tensor may be named twice: then it is one operand with two places, of which neither is split
    if sorted(refs(call.args[1])) != list(range(len(call.operands))):
        return Rule()
    return product(call, placed, place(result, whole), linear=tuple((i,) for i in range(len(operands))))


@rule("aten.chain_matmul.default", "aten.linalg_multi_dot.default")
def chain(call: Call) -> Rule:
    tensors = [call.operands[r.index] for r in call.args[0] if isinstance(r, Ref)]
    terms = [[[f"c{i}"], [f"c{i + 1}"]] for i in range(len(tensors))]
    linear = tuple((i,) for i in range(len(tensors)))
    return from_labels(terms, [[["c0"], [f"c{len(tensors)}"]]], call, linear=linear, products=PRODUCTS)
