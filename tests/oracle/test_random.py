"""Rules on shapes that nobody chose: random reshapes, broadcasts, products and sections."""

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.harness import Case, check, floats
from tests.oracle.missing import forgotten
from tests.properties import examples

FEW = settings(max_examples=examples(30), deadline=None, derandomize=True)
MESHES = ((2,), (3,), (2, 2), (2, 3))


@st.composite
def factorings(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """A shape of so many elements."""
    shape = []
    while total > 1 and len(shape) < 4:
        size = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
        shape.append(size)
        total //= size
    return (*shape, total) if total > 1 or not shape else tuple(shape)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    total = draw(st.sampled_from([6, 8, 12, 16, 24, 30, 36, 40, 48, 60]))
    return draw(factorings(total)), draw(factorings(total))


@FEW
@given(reshapes())
def test_reshape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    before, after = shapes
    case = Case("aten.view.default", (floats(*before), after), meshes=MESHES)
    check(case)
    assert forgotten(case) == set()


sizes = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=4).map(tuple)


@st.composite
def broadcast_to(draw: st.DrawFn, whole: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that is broadcast to the whole one: leading dims missing, others of size one."""
    kept = whole[draw(st.integers(0, len(whole))) :]
    return tuple(size if draw(st.booleans()) else 1 for size in kept)


@FEW
@given(st.data(), sizes, st.sampled_from(["add", "mul", "div", "sub"]))
def test_broadcast(data: st.DataObject, whole: tuple[int, ...], name: str) -> None:
    one, two = data.draw(broadcast_to(whole)), data.draw(broadcast_to(whole))
    case = Case(f"aten.{name}.Tensor", (floats(*one), floats(*two)), meshes=MESHES)
    check(case)
    assert forgotten(case) == set()


@FEW
@given(st.data(), st.lists(st.sampled_from([1, 2, 4]), max_size=2).map(tuple))
def test_matmul(data: st.DataObject, batch: tuple[int, ...]) -> None:
    m, k, n = (data.draw(st.sampled_from([1, 2, 4, 5])) for _ in range(3))
    left, right = (*data.draw(broadcast_to(batch)), m, k), (*data.draw(broadcast_to(batch)), k, n)
    if data.draw(st.booleans()):
        left = left[-1:]
    elif data.draw(st.booleans()):
        right = right[-2:-1]
    case = Case("aten.matmul.default", (floats(*left), floats(*right)), meshes=MESHES)
    check(case)
    assert forgotten(case) == set()


@settings(FEW, max_examples=examples(15))
@given(st.lists(st.integers(1, 7), min_size=2, max_size=4).map(tuple), st.booleans())
def test_sections(lengths: tuple[int, ...], leading: bool) -> None:
    total, dim = sum(lengths), 0 if leading else -1
    shape = (total, 2) if leading else (2, total)
    check(Case("aten.split_with_sizes.default", (floats(*shape), lengths, dim), meshes=MESHES))
    start, stop = lengths[0], sum(lengths[:2])
    check(Case("aten.slice.Tensor", (floats(*shape), dim, start, stop), meshes=MESHES))
    parts = tuple(floats(*((length, 2) if leading else (2, length))) for length in lengths)
    check(Case("aten.cat.default", (parts, dim), meshes=MESHES))


@FEW
@given(st.data(), sizes)
def test_expand(data: st.DataObject, whole: tuple[int, ...]) -> None:
    case = Case("aten.expand.default", (floats(*data.draw(broadcast_to(whole))), whole), meshes=MESHES)
    check(case)
    if prod(whole) > 1:
        assert forgotten(case) == set()
