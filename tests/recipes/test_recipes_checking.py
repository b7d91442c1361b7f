"""Versions with recipes as a whole: parts, forks, checks, repairs, deltas, ageing, collections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipekit import Form, save, stored_bytes

import ckptstore
from ckptstore.checkpoint.content import Content, content_digest, read_content
from ckptstore.errors import CorruptTensorError
from ckptstore.format.keys import pack_key
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.format.paths import path_text
from ckptstore.model import Version

Stores = Callable[..., ckptstore.Store]
MASTER = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
MOMENT = torch.randn(200, 300, generator=torch.Generator().manual_seed(2))
STATE = {
    "model": {"weight": MASTER.to(torch.bfloat16)},
    "optimizer": {"master": MASTER, "m": MOMENT},
}
FORMS = {"model.weight": Form(of="optimizer.master"), "optimizer.m": Form(code="linear")}


def head(run: ckptstore.Run) -> Version:
    """Return the newest version of a run."""
    assert run.head is not None
    return run.head


def content_of(store: ckptstore.Store, version: Version | str) -> Content:
    """Return the content of a version."""
    version = store.version(version).info if isinstance(version, str) else version
    return read_content(store.repo.manifests.load(version))


def places(content: Content, name: str) -> tuple[int, ...]:
    """Return the places of the tensors that one follows from."""
    index = next(leaf.index for leaf in content.leaves if path_text(leaf.path) == name)
    recipe = content.manifest.tensors[index].recipe
    assert recipe is not None
    return recipe.sources


def flip(store: ckptstore.Store, content: Content, index: int) -> None:
    """Flip a bit in the first chunk of a record."""
    table = content.manifest.pieces
    row = content.manifest.first[index]
    key = pack_key(table.packs[int(table.pack[row])])
    data = bytearray(store.repo.backend.get(key, bytes_max=1 << 30))
    data[int(table.offset[row]) + CHUNK_HEADER_BYTES + int(table.stored[row]) // 2] ^= 4
    store.repo.backend.delete(key)
    store.repo.backend.put(key, bytes(data))


def test_hidden_tensors_are_nowhere_to_be_seen(stores: Stores) -> None:
    """Listings, sizes by role and labels know the tensors of the state only."""
    store = stores()
    version, _ = save(store, STATE, FORMS)
    content = content_of(store, version)

    assert len(content.manifest.tensors) == 5
    assert content.hidden == frozenset(places(content, "optimizer.m"))
    assert [info.path for info in content.tensors()] == [
        "model.weight",
        "optimizer.master",
        "optimizer.m",
    ]
    assert {content.labels[place] for place in content.hidden} == {"optimizer.m"}
    assert all(info.pieces > 0 for info in content.tensors())
    assert store.version("gpt").keys() == ["model.weight", "optimizer.master", "optimizer.m"]


def test_a_part_keeps_what_its_tensors_follow_from(stores: Stores) -> None:
    """A fork of the weights alone holds their masters hidden; one of the optimizer drops nothing.

    What is hidden has the role of what follows from it.
    """
    store = stores()
    save(store, STATE, FORMS)
    weights = head(store.fork("gpt", "weights", include=["model"]))
    rest = head(store.fork("gpt", "rest", include=["optimizer"]))
    content = content_of(store, weights)

    assert len(content.leaves) == 1
    assert len(content.hidden) == 1
    assert {record.role for record in content.manifest.tensors} == {"weights"}
    assert weights.roles["weights"].logical == 2 * MASTER.numel()
    assert torch.equal(store.load("weights")["model"]["weight"], STATE["model"]["weight"])
    assert content_of(store, rest).hidden
    assert torch.equal(store.load("rest")["optimizer"]["master"], MASTER)
    assert store.verify().ok


def test_a_version_travels_to_another_store(stores: Stores) -> None:
    """It loads there as here; its hidden tensors come along, and count for no logical byte."""
    here, there = stores(), stores(chunk_bytes=1 << 18)
    version, expected = save(here, STATE, FORMS)

    landed = head(here.fork("gpt", "copy", store=there))

    loaded = there.load("copy")
    assert torch.equal(loaded["optimizer"]["m"], expected["optimizer.m"])
    assert torch.equal(loaded["model"]["weight"], STATE["model"]["weight"])
    assert {role: part.logical for role, part in landed.roles.items()} == {
        "optimizer": 8 * MASTER.numel(),
        "weights": 2 * MASTER.numel(),
    }
    assert content_digest(content_of(there, landed).manifest) == landed.content == version.content
    assert there.verify().ok


def test_versions_differ_by_what_they_give_back(stores: Stores) -> None:
    """A diff says of tensors with recipes whether they are the same, wherever their codes lie."""
    store = stores()
    save(store, STATE, FORMS, step=1)
    save(store, {"new": torch.ones(7), **STATE}, FORMS, step=2)
    changed = {**STATE, "optimizer": {"master": MASTER, "m": MOMENT * 2}}
    save(store, changed, FORMS, step=3)

    one, two = (store.diff("gpt@1", other) for other in ("gpt@2", "gpt@3"))

    assert {c.path: c.status for c in one.changes} == {
        "new": "added", "model.weight": "same", "optimizer.master": "same", "optimizer.m": "same",
    }  # fmt: skip
    assert {c.path: c.status for c in two.changes} == {
        "model.weight": "same",
        "optimizer.master": "same",
        "optimizer.m": "changed",
    }
    assert next(c for c in one.changes if c.path == "optimizer.m").same_bytes == 4 * MOMENT.numel()
    found = two.errors("optimizer.m")["optimizer.m"]
    assert found is not None
    assert found.max_abs > 1


def test_equal_states_have_one_digest_by_their_recipes(stores: Stores) -> None:
    """The digest of the content is that of the same state in the same forms, and of no other."""
    one, other = stores(), stores()
    first, _ = save(one, STATE, FORMS)
    second, _ = save(other, STATE, FORMS, run="else", step=4)
    third, _ = save(one, STATE, {}, step=1)
    fourth, _ = save(one, STATE, {**FORMS, "optimizer.m": Form(code="linear", block=64)}, step=2)

    assert first.content == second.content
    assert len({first.content, third.content, fourth.content}) == 3


@pytest.mark.parametrize("which", [0, 1])
def test_damage_to_what_is_hidden_is_that_of_the_tensor(stores: Stores, which: int) -> None:
    """A flipped bit in codes or scales is found by a load and by verify, by the visible path."""
    store = stores()
    version, _ = save(store, STATE, FORMS)
    content = content_of(store, version)
    flip(store, content, places(content, "optimizer.m")[which])

    with pytest.raises(CorruptTensorError, match=r"tensor optimizer\.m: "):
        store.load("gpt")
    with pytest.raises(CorruptTensorError, match=r"tensor optimizer\.m: "):
        store.version("gpt")["optimizer.m"][0]
    report = store.verify()

    assert [problem.tensor for problem in report.problems if problem.tensor] == ["optimizer.m"]
    assert torch.equal(store.load("gpt", include=["model"])["model"]["weight"], MASTER.bfloat16())


def test_damage_to_what_is_visible_is_that_of_all_that_follows(stores: Stores) -> None:
    """A damaged master costs the weights that follow from it, and verify says so."""
    store = stores()
    version, _ = save(store, STATE, FORMS)
    content = content_of(store, version)
    flip(store, content, places(content, "model.weight")[0])

    with pytest.raises(CorruptTensorError, match=r"tensor model\.weight: "):
        store.load("gpt", include=["model"])
    found = [problem.tensor for problem in store.verify().problems if problem.tensor]

    assert found == ["model.weight", "optimizer.master"]


def test_verify_compares_what_recipes_give(stores: Stores) -> None:
    """A digest that no load could meet is found by a full check, of each version that has it."""
    store = stores()
    save(store, STATE, FORMS, step=1)
    wrong = {"digest": b"x" * 32, "exact": False}
    save(store, STATE, {"optimizer.m": FORMS["optimizer.m"]}, step=2, change=wrong)
    save(store, STATE, {"optimizer.m": FORMS["optimizer.m"]}, step=3, change=wrong)

    assert store.verify(level="records").ok
    report = store.verify()

    assert [(problem.step, problem.tensor) for problem in report.problems] == [
        (2, "optimizer.m"),
        (3, "optimizer.m"),
    ]
    assert "another digest" in report.problems[0].message


def test_repair_says_what_cannot_be_mended(stores: Stores) -> None:
    """A tensor that does not follow as it should is lost; what has lost pieces is quarantined."""
    store = stores()
    version, _ = save(store, STATE, FORMS, step=1)
    wrong = {"digest": b"x" * 32, "exact": False}
    other = {"optimizer": {"m": MASTER}}
    save(store, other, {"optimizer.m": FORMS["optimizer.m"]}, run="b", change=wrong)
    content = content_of(store, version)
    for place in places(content, "optimizer.m"):
        flip(store, content, place)

    report = store.repair()

    assert {(lost.run, lost.tensors) for lost in report.lost} == {
        ("gpt", ("optimizer.m",)),
        ("b", ("optimizer.m",)),
    }
    assert len(report.quarantined) == 2


def test_repair_brings_back_what_is_hidden(stores: Stores) -> None:
    """Codes that another store has too are copied from there, and the version is whole again."""
    store, copy = stores(), stores()
    version, expected = save(store, STATE, FORMS)
    store.fork("gpt", "copy", store=copy)
    content = content_of(store, version)
    for place in places(content, "optimizer.m"):
        flip(store, content, place)

    report = store.repair(source=copy)

    assert [mended.tensors for mended in report.mended] == [("optimizer.m",)]
    assert not report.lost
    found = store.load("gpt")["optimizer"]["m"]
    assert stored_bytes(found) == stored_bytes(expected["optimizer.m"])


def test_a_check_that_goes_on_does_not_follow_recipes_again(stores: Stores, tmp_path: Path) -> None:
    """What an interrupted check found of a recipe stays found, and is not read a second time."""
    store = stores()
    save(store, STATE, FORMS, step=1)
    wrong = {"digest": b"x" * 32, "exact": False}
    save(store, {"m": MOMENT}, {"m": Form(code="linear")}, step=2, change=wrong)
    save(store, {"m": MASTER}, {"m": Form(code="linear")}, step=3)
    state = tmp_path / "state"
    seen: list[int] = []

    def stop(step: ckptstore.Progress) -> None:
        seen.append(step.done)
        if len(seen) > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.verify(resume=state, progress=stop)
    lines = state.read_bytes().splitlines()
    report = store.verify(resume=state)

    assert len(lines) > 3
    assert [(problem.step, problem.tensor) for problem in report.problems] == [(2, "m")]


ENCODINGS = {"optimizer.*.m": "int8", "optimizer.*.v": "dynamic8", "ema.*": "bf16"}


def state(step: int) -> dict[str, Any]:
    """Return weights in bfloat16 with masters, moments and an average, as training leaves them."""
    random = torch.Generator().manual_seed(1)
    master = torch.randn(300, 400, generator=random) * 0.02
    moved = torch.randn(300, 400, generator=torch.Generator().manual_seed(100 + step))
    master = master + 1e-4 * step * moved
    return {
        "model": {"w": master.to(torch.bfloat16)},
        "optimizer": {
            "master": {"w": master},
            "w": {"m": moved * 1e-3, "v": moved.square() * 1e-6},
        },
        "ema": {"w": master * 0.99},
        "step": step,
    }


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Return the tensors of a state by dotted path."""
    if isinstance(value, torch.Tensor):
        return {name[1:]: value}
    found = {}
    for key, item in value.items() if isinstance(value, dict) else ():
        found.update(flat(item, f"{name}.{key}"))
    return found


@pytest.mark.parametrize("codec", ["auto", "delta", "raw"])
def test_every_codec_and_every_way(stores: Stores, codec: str) -> None:
    """Versions in any codec load, slice and travel alike, and pass a full check."""
    here, there = stores(host_bytes=1 << 20), stores(chunk_bytes=1 << 17)
    run = here.run("gpt", encodings=ENCODINGS)
    for step in range(3):
        run.save(state(step), step=step, codec=codec)
    here.fork("gpt@1", "there", store=there)
    here.fork("gpt@2", "part", include=["model", "ema"])
    for step in range(3):
        given, loaded = flat(state(step)), flat(here.load(f"gpt@{step}"))
        lazy = here.version(f"gpt@{step}")
        assert loaded.keys() == given.keys()
        for name, tensor in loaded.items():
            exact = name in ("model.w", "optimizer.master.w")
            assert torch.equal(tensor, given[name]) == exact, name
            error = (tensor.float() - given[name].float()).norm() / given[name].float().norm()
            assert error < 0.02, name
            assert torch.equal(lazy[name][17:40, 5], tensor[17:40, 5]), name
    whole = flat(here.load("gpt@1"))
    assert all(torch.equal(t, whole[name]) for name, t in flat(there.load("there")).items())
    last = flat(here.load("gpt@2"))
    assert all(torch.equal(t, last[name]) for name, t in flat(here.load("part")).items())
    assert here.verify().ok
    assert there.verify().ok


def test_a_collection_keeps_what_is_hidden(stores: Stores) -> None:
    """Packs of codes and scales, and of masters that a part keeps hidden, outlive a collection."""
    store = stores()
    run = store.run("gpt", encodings=ENCODINGS)
    for step in range(3):
        run.save(state(step), step=step)
    store.fork("gpt@2", "part", include=["model.w", "optimizer.w"])
    expected = flat(store.load("part"))
    store.remove([f"gpt@{step}" for step in range(3)], force=True)
    store.gc(grace_s=0, orphan_age_s=0)
    store.gc(grace_s=0, orphan_age_s=0)

    assert store.verify().ok
    assert all(torch.equal(t, expected[name]) for name, t in flat(store.load("part")).items())


def test_ageing_keeps_the_bits_of_weights(stores: Stores) -> None:
    """Weights that follow from masters come back bit for bit from a version that lost the rest."""
    store = stores()
    run = store.run("gpt", encodings=ENCODINGS)
    for step in range(2):
        run.save(state(step), step=step)
    store.age(["gpt@0"], "weights")
    store.gc(grace_s=0, orphan_age_s=0)
    store.gc(grace_s=0, orphan_age_s=0)

    loaded = flat(store.load("gpt@0"))
    assert torch.equal(loaded["model.w"], state(0)["model"]["w"])
    assert not any(name.startswith("optimizer") for name in loaded)
    assert store.verify().ok
