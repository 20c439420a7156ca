"""Checkpoints across meshes, plans and single devices; weights to and from transformers; crashes and mistakes."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tapas.checkpoint import (
    CheckpointError,
    atomic_folder,
    load_checkpoint,
    load_safetensors,
    load_weights,
    save_checkpoint,
    save_safetensors,
)
from tests.distributed import saved
from tests.distributed.parallel import model_of
from tests.distributed.pool import Pool
from tests.distributed.saved import Hand, contents, scramble

full = pytest.mark.full
# transformers' losses and norms are float32 in any case
NEAR = {"packed": 1e-12, "quantised": 1e-5, "llama": 1e-5, "gpt2": 1e-5}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        if torch.is_tensor(x):
            assert found[name].dtype == x.dtype and torch.equal(found[name], x), name
        else:
            assert found[name] == x and type(found[name]) is type(x), name


def hidden(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def ranks(answers: list[Any], mesh: tuple[int, ...]) -> list[Any]:
    found = [a for a in answers if a is not None]
    assert len(found) == torch.Size(mesh).numel()
    return found


CASES = [(f, "adamw") for f in ("packed", "quantised")]
CASES += [pytest.param(f, "adamw", marks=full) for f in ("llama", "gpt2")]
CASES.append(pytest.param("packed", "sgd", marks=full))


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_one_mesh_saves_every_other_loads(pool: Pool, tmp_path: Path, family: str, kind: str) -> None:
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    first = ranks(pool(saved.run, family, (4,), kind, None, 2, a, 2), (4,))
    same(first[1]["saved"], first[0]["saved"])
    assert first[0]["strided"] or family != "packed"
    assert first[0]["uneven"] or family != "gpt2"

    alone = saved.run(0, family, (), kind, a, 0, None, 2)
    assert alone is not None
    same(alone["loaded"], first[0]["saved"])
    assert alone["more"] == pytest.approx(first[0]["more"], rel=NEAR[family])

    second = ranks(pool(saved.run, family, (2, 2), kind, a, 0, b, 2), (2, 2))
    for rank in second:
        same(rank["loaded"], first[0]["saved"])
        assert rank["extra"].pop("noise").tolist() == [0, 1, 2]
        assert rank["extra"] == {"rank": 0, "at": (1, 2.5)}
        assert rank["more"] == pytest.approx(first[0]["more"], rel=NEAR[family])

    third = saved.run(0, family, (), kind, b, 1, c)
    assert third is not None
    same(third["loaded"], first[0]["saved"])

    for rank in ranks(pool(saved.run, family, (4,), kind, c, 0, None), (4,)):
        same(rank["loaded"], third["saved"])
    for rank in ranks(pool(saved.run, family, (2,), kind, c, 0, d), (2,)):
        same(rank["loaded"], third["saved"])
    again = saved.run(0, family, (), kind, d, 0, None)
    assert again is not None
    same(again["loaded"], third["saved"])
    assert not hidden(tmp_path)


@pytest.mark.parametrize("family", ["packed", *(pytest.param(f, marks=full) for f in ("gpt2", "llama"))])
def test_the_same_mesh_goes_on_as_if_nothing_had_happened(pool: Pool, tmp_path: Path, family: str) -> None:
    path = str(tmp_path / "a")
    through = ranks(pool(saved.run, family, (2, 2), "adamw", None, 2, path, 3), (2, 2))
    resumed = ranks(pool(saved.run, family, (2, 2), "adamw", path, 3, None), (2, 2))
    assert [r["losses"] for r in resumed] == [r["more"] for r in through]


def test_an_optimizer_that_has_not_stepped(pool: Pool, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first = ranks(pool(saved.run, "packed", (4,), "adamw", None, 0, a), (4,))
    alone = saved.run(0, "packed", (), "adamw", a, 0, b, 1)
    assert alone is not None
    same(alone["loaded"], first[0]["saved"])
    for rank in ranks(pool(saved.run, "packed", (2, 2), "adamw", b, 0, None, 1), (2, 2)):
        same(rank["loaded"], first[0]["saved"])
        assert rank["more"] == pytest.approx(alone["more"], rel=1e-12)


R = Replicate()
PLACEMENTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "split": ((4,), {"a": [Shard(0)], "b": [Shard(0)], "c": [_StridedShard(0, split_factor=3)], "d": [R],
                     "e": [Shard(1)], "f": [Shard(1)]}),
    "twice": ((2, 2), {"a": [Shard(0), Shard(0)], "b": [Shard(0), R], "c": [_StridedShard(0, split_factor=2), Shard(0)],
                       "d": [R, R], "e": [Shard(1), Shard(1)], "f": [R, Shard(1)]}),
    "mixed": ((2, 2), {"a": [Shard(1), Shard(0)], "b": [R, Shard(0)], "c": [Shard(1), _StridedShard(0, split_factor=6)],
                       "d": [R, R], "e": [Shard(2), Shard(1)], "f": [Shard(1), R]}),
    "three": ((3,), {"a": [Shard(0)], "b": [R], "c": [_StridedShard(0, split_factor=2)], "d": [R], "e": [Shard(1)],
                     "f": [R]}),
}  # fmt: skip


@pytest.mark.parametrize("source", PLACEMENTS)
def test_every_kind_of_split(pool: Pool, tmp_path: Path, source: str) -> None:
    wanted = contents(Hand())
    path = str(tmp_path / source)
    for found in ranks(pool(saved.by_hand, *PLACEMENTS[source], None, path), PLACEMENTS[source][0]):
        same(found, wanted)
    alone = Hand()
    for load in (lambda: load_checkpoint(path, alone), lambda: load_safetensors(alone, path + "-weights")):
        scramble(alone)
        load()
        same(contents(alone), wanted)
    for name, (mesh, placements) in PLACEMENTS.items():
        for found in ranks(pool(saved.by_hand, mesh, placements, path, str(tmp_path / f"{source}-{name}")), mesh):
            same(found, wanted)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=full if k == "sgd" else ()) for k in saved.OPTIMIZERS])
def test_optimizer_state_of_every_kind_of_split(pool: Pool, tmp_path: Path, kind: str) -> None:
    names = list(PLACEMENTS)
    for source, target in zip(names, [*names[1:], names[0]], strict=True):
        for load, save, name in (None, "a", source), ("a", "b", target):
            args = (kind, load and str(tmp_path / load), str(tmp_path / save))
            alone = saved.steps_by_hand(0, (), {}, *args[:2], str(tmp_path / "alone"))
            for found in ranks(pool(saved.steps_by_hand, *PLACEMENTS[name], *args), PLACEMENTS[name][0]):
                same(found, alone)


def test_a_mesh_that_is_a_part_of_the_world(pool: Pool, tmp_path: Path) -> None:
    for found in ranks(pool(saved.on_part_of_the_world, str(tmp_path / "a")), (1, 2)):
        same(found, contents(Hand()))


def test_plain_modules_in_a_process_group_are_saved_once(pool: Pool, tmp_path: Path) -> None:
    pool(saved.replicas, str(tmp_path / "a"))
    module = Hand()
    scramble(module)
    load_checkpoint(tmp_path / "a", module)
    same(contents(module), contents(Hand()))


# --- single process --------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.inner, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.inner.weight


def test_what_was_tied_loads_where_it_is_not(tmp_path: Path) -> None:
    module = Tied()
    save_checkpoint(tmp_path / "a", module)
    apart = Tied(False)
    load_checkpoint(tmp_path / "a", apart)
    assert torch.equal(apart.inner.weight, module.inner.weight) and torch.equal(apart.head.weight, module.inner.weight)
    save_checkpoint(tmp_path / "b", apart)
    with pytest.raises(CheckpointError, match="two tensors"):
        load_checkpoint(tmp_path / "b", module)


# what torch.compile imports of torch uses what torch calls deprecated
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_module_has_the_names_of_the_original(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", torch.compile(Hand()))
    load_checkpoint(tmp_path / "a", Hand())
    save_checkpoint(tmp_path / "b", Hand())
    load_checkpoint(tmp_path / "b", torch.compile(Hand()))


def test_options_of_an_optimizer(tmp_path: Path) -> None:
    """Several groups, another order, a learning rate that is a tensor."""

    def adam(module: Hand, *groups: str, lr: float) -> torch.optim.Adam:
        return torch.optim.Adam(
            [{"params": [getattr(module, n) for n in names], "lr": torch.tensor(lr * (i + 1)), "eps": lr}
             for i, names in enumerate(groups)], foreach=False, amsgrad=True,
        )  # fmt: skip

    module = Hand()
    optimizer = adam(module, "ab", "cde", lr=0.5)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    save_checkpoint(tmp_path / "a", module, optimizer)
    other = Hand()
    again = adam(other, "ba", "edc", lr=0.1)
    scramble(other)
    assert load_checkpoint(tmp_path / "a", other, again) is None
    same(contents(other, again), contents(module, optimizer))
    with pytest.raises(CheckpointError, match=r"group 0 .* b"):
        load_checkpoint(tmp_path / "a", other, adam(other, "a", "bcde", lr=0.1))
    with pytest.raises(CheckpointError, match="2 groups, this one 1"):
        load_checkpoint(tmp_path / "a", other, adam(other, "abcde", lr=0.1))
    stranger = torch.optim.SGD(Hand().parameters())
    with pytest.raises(CheckpointError, match="parameter that the module does not have"):
        save_checkpoint(tmp_path / "b", module, stranger)


def test_extra_is_plain_data(tmp_path: Path) -> None:
    import random

    extra = {"step": 3, "lr": 0.1, "python": random.getstate(), "torch": torch.get_rng_state(), "none": [None, True],
             "inf": float("inf"), "tensor": "tensor", "dict": {"tuple": ()}}  # fmt: skip
    save_checkpoint(tmp_path / "a", Hand(), extra=extra)
    found = load_checkpoint(tmp_path / "a", Hand())
    assert torch.equal(found.pop("torch"), extra.pop("torch"))
    assert found == extra
    for wrong, fact in (({"x": object()}, "extra.x: is a object"), ({1: 2}, "extra: has the key 1")):
        with pytest.raises(CheckpointError, match=fact):
            save_checkpoint(tmp_path / "b", Hand(), extra=wrong)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def _without(name: str):
    def change(folder: Path) -> None:
        (folder / name).unlink()

    return change


def _cut(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


class _Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


def _attack(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Attack()))


DAMAGES = {
    "no manifest": (_without("tapas.json"), "not a complete checkpoint"),
    "no metadata": (_without(".metadata"), "no .metadata"),
    "no data": (_without("__0_0.distcp"), "no __0_0.distcp"),
    "cut off": (_cut, "cut off"),
    "half a manifest": (lambda folder: (folder / "tapas.json").write_text('{"format'), "tapas.json is damaged"),
    "newer": (lambda folder: (folder / "tapas.json").write_text('{"format": 99}'), "has format 99"),
    "code": (_attack, "mkdir has no place in a checkpoint"),
    "gone": (lambda folder: shutil.rmtree(folder), "does not exist"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint("a", Hand())
    change, fact = DAMAGES[damage]
    change(tmp_path / "a")
    module = Hand()
    scramble(module)
    before = contents(module)
    with pytest.raises(CheckpointError, match=fact) as error:
        load_checkpoint("a", module)
    assert error.value.remedy
    same(contents(module), before)
    assert not (tmp_path / "attacked").exists()


def test_names_and_shapes_that_do_not_fit(pool: Pool, tmp_path: Path) -> None:
    class Other(Hand):
        SHAPES: ClassVar = Hand.SHAPES | {"b": (8,), "c": (24, 3)}

    class More(Hand):
        SHAPES: ClassVar = Hand.SHAPES | {"h": (2,)}

    class Less(Hand):
        SHAPES: ClassVar = {name: shape for name, shape in Hand.SHAPES.items() if name not in "ab"}

    facts = {Other: r"b has shape \(8,\) instead of \(7,\), c has", More: "has h, which", Less: "has no a, b;"}
    for kind, fact in facts.items():
        path = tmp_path / kind.__name__
        save_checkpoint(path, kind())
        save_safetensors(kind(), f"{path}-weights")
        torch.save(kind().state_dict(), f"{path}.pt")
        module = Hand()
        for load in (load_checkpoint, lambda p, m: load_safetensors(m, f"{p}-weights"),
                     lambda p, m: load_weights(m, f"{p}.pt")):  # fmt: skip
            with pytest.raises(CheckpointError, match=fact):
                load(path, module)
            same(contents(module), contents(Hand()))
    for text, unchanged in pool(saved.refused, str(tmp_path / "Less")):
        assert "has no a, b;" in text and unchanged
    with pytest.raises(CheckpointError, match="no optimizer state"):
        load_checkpoint(tmp_path / "Other", Other(), torch.optim.SGD(Other().parameters()))


class Killed(BaseException):
    """Not caught by anyone, like a signal."""


def two_versions(path: Path) -> tuple[Hand, Hand]:
    old, new = Hand(), Hand()
    scramble(old)
    save_checkpoint(path, old, extra="old")
    return old, new


@pytest.mark.parametrize("function", ["rename", "fsync"])
def test_who_is_killed_leaves_one_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    path = tmp_path / "a"
    old, new = two_versions(path)
    real, module, found = getattr(os, function), Hand(), []
    for at in range(20):
        calls = 0

        def dies(*args: Any, at: int = at) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:
                raise Killed
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(os, function, dies)
            try:
                save_checkpoint(path, new, extra="new")
                break
            except Killed:
                pass
        found.append(load_checkpoint(path, module))
        same(contents(module), contents(old if found[-1] == "old" else new))
        save_checkpoint(path, old, extra="old")
        assert not hidden(tmp_path)
    assert found == (["old"] * 3 if function == "rename" else ["old"] * (len(found) - 1) + ["new"])
    assert load_checkpoint(path, module) == "new"
    assert not hidden(tmp_path)


def test_a_rename_that_is_refused_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    _, new = two_versions(path)
    real = os.rename

    def refuses(source: Any, target: Any) -> None:
        if str(source).endswith(".part"):
            raise PermissionError(13, "Permission denied")
        real(source, target)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="Permission denied"):
        patched.setattr(os, "rename", refuses)
        save_checkpoint(path, new)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert load_checkpoint(path, Hand()) == "old"


def test_a_save_removes_only_what_is_its_own(tmp_path: Path) -> None:
    for name in (".a.0123456789abcdef.part", ".a.b.0123456789abcdef.part", ".a.part", ".aa.0123456789abcdef.part"):
        (tmp_path / name).mkdir()
    save_checkpoint(tmp_path / "a", Hand())
    assert sorted(hidden(tmp_path)) == [".a.b.0123456789abcdef.part", ".a.part", ".aa.0123456789abcdef.part"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        save_checkpoint(tmp_path / "mine", Hand())


@pytest.mark.parametrize("where", [0, 3])
def test_one_rank_that_fails_fails_all(pool: Pool, tmp_path: Path, where: int) -> None:
    path = tmp_path / "a"
    old, _ = two_versions(path)
    answers = pool(saved.failing, str(path), where)
    assert len(set(answers)) == 1 and "No space left" in answers[0]
    module = Hand()
    assert load_checkpoint(path, module) == "old"
    same(contents(module), contents(old))
    assert not hidden(tmp_path)
    assert pool(saved.failing, str(path), -1) == ["saved"] * 4


# --- weights ---------------------------------------------------------------------------------------------

HUB: dict[str, Any] = {"llama": T.LlamaForCausalLM, "gpt2": T.GPT2LMHeadModel}


def pretrained(family: str, folder: Path) -> nn.Module:
    model, info = HUB[family].from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values())
    return model


@pytest.mark.parametrize(("family", "most"), [("llama", 40_000), ("llama", 10**9), ("gpt2", 20_000)])
def test_transformers_reads_what_is_written(pool: Pool, tmp_path: Path, family: str, most: int) -> None:
    for found in pool(saved.exported, family, (4,), str(tmp_path), most):
        same(found, model_of(family)[0].state_dict())
    model_of(family)[0].config.save_pretrained(tmp_path)
    same(pretrained(family, tmp_path).state_dict(), model_of(family)[0].state_dict())
    assert (tmp_path / "model.safetensors").exists() == (most == 10**9)
    sizes = [sum(t.nbytes for t in load_file(f).values()) for f in tmp_path.glob("*.safetensors")]
    assert max(sizes) <= most


@pytest.mark.parametrize(("family", "mesh"), [("llama", (2, 2)), ("gpt2", (4,)), ("packed", (4,))])
def test_each_rank_reads_its_part(pool: Pool, tmp_path: Path, family: str, mesh: tuple[int, ...]) -> None:
    model = model_of(family)[0]
    if family in HUB:
        model.save_pretrained(tmp_path / "weights", max_shard_size="20KB")
        assert len(list((tmp_path / "weights").glob("*.safetensors"))) > 1
    else:
        save_safetensors(model, tmp_path / "weights")
    for found, read, held in pool(saved.imported, family, mesh, str(tmp_path / "weights")):
        same(found, model.state_dict())
        assert read == held < sum(p.numel() for p in model.parameters())
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for found, _, _ in pool(saved.imported, family, mesh, str(tmp_path / "weights.pt")):
        same(found, model.state_dict())


def test_weights_are_cast(tmp_path: Path) -> None:
    save_safetensors(Hand().bfloat16(), tmp_path / "a")
    torch.save(Hand().half().state_dict(), tmp_path / "a.pt")
    for load, kind in ((lambda m: load_safetensors(m, tmp_path / "a"), torch.bfloat16),
                       (lambda m: load_weights(m, tmp_path / "a.pt"), torch.float16)):  # fmt: skip
        module = Hand()
        scramble(module)
        load(module)
        assert all(
            torch.equal(x, y.to(kind).float()) for x, y in zip(module.parameters(), Hand().parameters(), strict=True)
        )


def test_tied_weights_in_files(tmp_path: Path) -> None:
    module = Tied()
    save_safetensors(module, tmp_path)
    assert list(load_file(tmp_path / "model.safetensors")) == ["inner.weight"]
    state = {name: torch.ones(5, 3) for name in module.state_dict()}
    save_file(state, tmp_path / "both.safetensors")
    load_safetensors(module, tmp_path / "both.safetensors")
    assert torch.equal(module.head.weight, torch.ones(5, 3))
    save_file(state | {"head.weight": torch.zeros(5, 3)}, tmp_path / "differ.safetensors")
    with pytest.raises(CheckpointError, match=r"inner.weight and head.weight differ"):
        load_safetensors(module, tmp_path / "differ.safetensors")


def test_weights_replace_weights_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    old, new, module = Hand(), Hand(), Hand()
    scramble(old)
    real = {name: getattr(os, name) for name in ("rename", "replace", "unlink")}
    for first, second in ((200, 200), (200, 300), (200, 10**9), (10**9, 200), (10**9, 10**9)):
        save_safetensors(old, tmp_path, first)
        for at in range(20):  # dies at each change of a name
            calls = 0

            def dies(name: str, *args: Any, at: int = at, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > at:
                    raise Killed
                return real[name](*args, **kwargs)

            with monkeypatch.context() as patched:
                for name in real:
                    patched.setattr(os, name, lambda *a, name=name, dies=dies, **k: dies(name, *a, **k))
                patched.setattr(atomic_folder, "discard", lambda part: None)
                try:
                    save_safetensors(new, tmp_path, second)
                    break
                except Killed:
                    pass
            load_safetensors(module, tmp_path)
            assert module.a[0, 0] in (old.a[0, 0], new.a[0, 0])
            same(contents(module), contents(old if module.a[0, 0] == old.a[0, 0] else new))
            save_safetensors(old, tmp_path, first)
        else:
            raise AssertionError("never finished")
        assert at > 1 or second == 10**9
        save_safetensors(new, tmp_path, second)
        load_safetensors(module, tmp_path)
        same(contents(module), contents(new))
        assert not hidden(tmp_path)
        files = {p.name for p in tmp_path.iterdir()} - {"config.json"}
        index = tmp_path / "model.safetensors.index.json"
        said = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        assert files == said | ({index.name} if index.exists() else set())


def test_mistakes_with_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Hand()
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    torch.save({"model": module.state_dict()}, tmp_path / "nested.pt")
    torch.save(Tied(), tmp_path / "module.pt")
    save_safetensors(module, tmp_path / "shards", 200)
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    for load, name, fact in (
        (load_safetensors, "none", "does not exist"),
        (load_safetensors, "empty", "has no weights"),
        (load_safetensors, "bad.safetensors", "cannot be read"),
        (load_safetensors, "shards", "model-00002-of-.* is missing"),
        (load_weights, "none.pt", "does not exist"),
        (load_weights, "nested.pt", "is not a dict of tensors"),
        (load_weights, "module.pt", "cannot be read as weights"),
        (load_weights, "bad.safetensors", "cannot be read as weights"),
        (save_safetensors, "bad.safetensors", "is not a folder"),
        (save_safetensors, "new.safetensors", "is not a folder"),
    ):
        with pytest.raises(CheckpointError, match=fact) as error:
            load(module, tmp_path / name)
        assert error.value.remedy
    with pytest.raises(CheckpointError, match="meta device"):
        load_safetensors(Tied().to("meta"), tmp_path / "empty")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match="pip install"):
        load_safetensors(module, tmp_path / "bad.safetensors")
