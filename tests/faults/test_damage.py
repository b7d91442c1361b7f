"""Bits that flip, objects that are cut or vanish: noticed, named, and no harm to the rest."""

from __future__ import annotations

import random  # noqa: TID251 - seeded
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from faultkit.states import differences, state_of
from faultkit.stores import contents, create, load_id, memory_with, reopen

from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import (
    CkptStoreError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StoreNotFoundError,
)
from ckptstore.format.manifest import encode
from ckptstore.format.pack import CHUNK_HEADER_BYTES, HEADER_BYTES, TRAILER_BYTES, parse_trailer
from ckptstore.manifests import read_manifest

pytestmark = pytest.mark.timeout(180)

FLIPS = 40
"""Of each kind of place; there are nine."""
NEEDED = {"store.json", "commit", "manifest", "chunk header", "stored bytes"}
"""What a load of some version reads; the others matter only to verify and repair."""
TYPED = (IntegrityError, FormatError, NotFoundError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """A store with every kind of object, and what its versions hold."""

    objects: dict[str, bytes]
    seeds: dict[str, int]
    """Version id to the seed of its state."""
    runs: dict[str, str]
    """Version id to its run."""


@pytest.fixture(scope="module")
def healthy() -> Healthy:
    """Return a store of two runs, five versions, tags, an annotation and one snapshot."""
    backend = memory_with({})
    seeds, runs = {}, {}
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 4)
    with create(backend) as store:
        for seed, name, codec in [
            (1, "gpt", "planes"),
            (2, "gpt", "planes"),
            (3, "bert", "raw"),
            (4, "gpt", "zstd"),
            (5, "bert", "planes"),
        ]:
            version = store.run(name, metrics={"loss": "min"}).save(
                state_of(seed), step=seed, metrics={"loss": 1 / seed}, codec=codec
            )
            seeds[version.id], runs[version.id] = seed, name
        store.tag("gpt@2", "good")
        store.annotate("bert@3", {"acc": float("nan")})
    patch.undo()
    return Healthy(objects=contents(backend), seeds=seeds, runs=runs)


def places(objects: dict[str, bytes]) -> dict[str, list[tuple[str, int, int]]]:
    """Return, by kind, the ``(key, first byte, end)`` of what can be damaged."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for key, data in objects.items():
        kind = key.split("/")[0]
        if kind != "packs":
            name = {"commits": "commit", "snapshots": "snapshot", "manifests": "manifest"}
            found.setdefault(name.get(kind, kind), []).append((key, 0, len(data)))
            continue
        index, count, _ = parse_trailer(data[-TRAILER_BYTES:], pack_bytes=len(data), where=key)
        found.setdefault("pack header", []).append((key, 0, HEADER_BYTES))
        found.setdefault("index", []).append((key, index, len(data) - TRAILER_BYTES))
        found.setdefault("trailer", []).append((key, len(data) - TRAILER_BYTES, len(data)))
        for row in range(count):
            at = int.from_bytes(data[index + 48 * row + 32 : index + 48 * row + 40], "little")
            size = int.from_bytes(data[index + 48 * row + 40 : index + 48 * row + 44], "little")
            body = at + CHUNK_HEADER_BYTES
            found.setdefault("chunk header", []).append((key, at, body))
            found.setdefault("stored bytes", []).append((key, body, body + size))
    return found


def try_all(storage: MemoryBackend, healthy: Healthy) -> dict[str, CkptStoreError | None]:
    """Load every version by its id in a store opened anew; values must be right or not come.

    Returns
    -------
    dict
        Version id to the error, or None where it loads bit-identical. Anything but a typed error
        fails the test.
    """
    results: dict[str, CkptStoreError | None] = {}
    for version, seed in healthy.seeds.items():
        try:
            with reopen(storage) as store:
                state = load_id(store, version)
        except TYPED as error:
            results[version] = error
        else:
            assert differences(state, state_of(seed)) == [], f"wrong values in {seed}"
            results[version] = None
    return results


def verdict(storage: MemoryBackend) -> list[str]:
    """Return what verify complains about: its problems, or the error that it raises."""
    try:
        with reopen(storage) as store:
            return [problem.message for problem in store.verify().problems]
    except TYPED as error:
        return [error.message]


def names_object(message: str, key: str) -> bool:
    """Say whether a message tells which object it is about."""
    return key in message or key.split("/")[-1].split(".")[0] in message


def damaged(objects: dict[str, bytes], key: str, data: bytes | None) -> MemoryBackend:
    """Return storage in which one object is replaced, or gone."""
    changed = {name: old for name, old in objects.items() if name != key}
    return memory_with(changed if data is None else {**changed, key: data})


def check_damage(storage: MemoryBackend, healthy: Healthy, kind: str, key: str) -> int:
    """Hold what must hold after `key` was damaged; return how many versions do not load."""
    complaints = verdict(storage)
    assert complaints, f"verify did not notice {kind} of {key}"
    assert any(names_object(text, key) for text in complaints), (kind, key, complaints)
    results = try_all(storage, healthy)
    lost = {version: error for version, error in results.items() if error is not None}
    for error in lost.values():
        named = names_object(error.message, key) or "tensor " in error.message
        assert named, f"{kind} of {key}: {error}"
    if kind not in NEEDED:
        assert not lost, f"{kind} of {key}: {lost}"
    if kind == "manifest":
        assert len(lost) == 1
    return len(lost)


@pytest.mark.short("commit|manifest|stored")
@pytest.mark.parametrize(
    "kind",
    [
        "store.json", "commit", "snapshot", "manifest", "pack header", "chunk header",
        "stored bytes", "index", "trailer",
    ],
)  # fmt: skip
def test_a_flipped_bit_is_noticed_named_and_harms_nothing_else(
    healthy: Healthy, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """For any single bit of any kind of object: verify reports it, no load gives other values.

    What needs the damaged bytes raises an error that names object or tensor; every other version
    loads bit-identical.
    """
    caplog.set_level("ERROR", logger="ckptstore")  # skipped snapshots are told at WARNING
    where = places(healthy.objects)[kind]
    chance = random.Random(f"flips of {kind}")
    lost = 0
    for _ in range(FLIPS):
        key, first, end = chance.choice(where)
        bit = chance.randrange(8 * first, 8 * end)
        torn = bytearray(healthy.objects[key])
        torn[bit // 8] ^= 1 << bit % 8
        storage = damaged(healthy.objects, key, bytes(torn))
        lost += check_damage(storage, healthy, kind, key)
    assert (lost > 0) == (kind in NEEDED)


def test_a_damaged_commit_leaves_what_came_before_it_in_reach(healthy: Healthy) -> None:
    """With no snapshot past it, older versions load by their id; past the newest, by any ref."""
    objects = {k: v for k, v in healthy.objects.items() if not k.startswith("snapshots/")}
    keys = sorted(key for key in objects if key.startswith("commits/"))
    for place, key in enumerate(keys):
        storage = damaged(objects, key, objects[key].replace(b'"at_ms":', b'"at_mS":'))
        results = try_all(storage, healthy)
        lost = [version for version, error in results.items() if error is not None]
        assert lost == list(healthy.seeds)[place:]
        with reopen(storage) as store:
            if key == keys[-1]:
                assert store.resolve("gpt@latest").step == 4
                continue
            with pytest.raises(IntegrityError, match=key):
                store.load("gpt@latest")  # what is the latest cannot be known


def cuts(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """Yield beginnings of an object, and the object with something after it."""
    for size in {0, 1, len(data) // 2, len(data) - 1, chance.randrange(len(data))}:
        yield data[:size]
    yield data + b"\0"
    yield data + data


@pytest.mark.short(sample=1)
@pytest.mark.parametrize("kind", ["store.json", "commits", "snapshots", "manifests", "packs"])
def test_objects_that_are_cut_or_gone_are_noticed(
    healthy: Healthy, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A truncated, doubled or missing object is found by verify, and never gives wrong values."""
    caplog.set_level("ERROR", logger="ckptstore")
    chance = random.Random(kind)
    keys = [key for key in sorted(healthy.objects) if key.startswith(kind)]
    for key in keys[:3] + keys[-1:]:
        for data in [*cuts(healthy.objects[key], chance), None]:
            storage = damaged(healthy.objects, key, data)
            results = try_all(storage, healthy)
            complaints = verdict(storage)
            # A snapshot that is gone is no loss, and the last commit could as well not have been.
            silent = data is None and (kind == "snapshots" or key == max(keys))
            assert complaints or (silent and kind in {"snapshots", "commits"}), (key, data)
            if kind == "snapshots":
                assert set(results.values()) == {None}
            if kind == "store.json" and data is None:
                assert all(isinstance(e, StoreNotFoundError) for e in results.values())


def test_a_lost_pack_costs_only_the_tensors_in_it(healthy: Healthy) -> None:
    """Where a pack is gone, tensors that lie elsewhere can be loaded from the same version."""
    versions = list(healthy.seeds)[1:]
    hit = 0
    for key in sorted(k for k in healthy.objects if k.startswith("packs/")):
        storage = damaged(healthy.objects, key, None)
        for version in versions:
            meant = state_of(healthy.seeds[version])["model"]
            for path in ("weight", "frozen", "embed"):
                found = load_part(storage, version, f"model.{path}")
                if isinstance(found, IntegrityError):
                    hit += 1
                    assert f"model.{path}" in found.message
                    assert names_object(found.message, key)
                else:
                    assert differences(found["model"][path], meant[path]) == []
    assert hit == 3 * len(versions)


def load_part(storage: MemoryBackend, version: str, path: str) -> Any:  # noqa: ANN401
    """Return what a load of one path gives, or the error of its integrity."""
    with reopen(storage) as store:
        try:
            return store.load(f"#{version}", include=[path])
        except IntegrityError as error:
            return error


def test_a_damaged_manifest_does_not_stop_the_training(healthy: Healthy) -> None:
    """A save after a version whose manifest is damaged or gone shares nothing, and works."""
    last = [version for version, run in healthy.runs.items() if run == "gpt"][-1]
    key = f"manifests/{last[:2]}/{last}.manifest"
    for data in (None, healthy.objects[key][:-1]):
        with reopen(damaged(healthy.objects, key, data)) as store:
            again = store.run("gpt").save(state_of(healthy.seeds[last]), step=9)
            assert differences(load_id(store, again), state_of(healthy.seeds[last])) == []
            assert again.parent == last


def test_another_manifest_of_a_version_is_refused() -> None:
    """One that is sound in itself, but exchanges two tensors, is not the one that was committed."""
    backend = memory_with({})
    with create(backend) as store:
        state = {name: torch.full((64,), value) for name, value in (("a", 1.0), ("b", 2.0))}
        version = store.run("gpt").save(state, step=1)
        committed = read_manifest(backend, version)
        other = encode(replace(committed, pieces=committed.pieces.take([1, 0])))
    assert len(other) == version.manifest_bytes
    with reopen(damaged(contents(backend), version.manifest_key, other)) as store:
        with pytest.raises(IntegrityError, match="does not match the digest"):
            load_id(store, version)
        assert store.verify().damaged_versions == (version.id,)


def test_damage_never_becomes_shared(healthy: Healthy) -> None:
    """A save after damage to a shared chunk still raises nothing, and verify names both versions.

    Sharing looks at ids in the parent's manifest and does not read the parent's data; the test
    fixes what follows: the damage shows in the new version too, by name, on load and verify.
    """
    last = [version for version, run in healthy.runs.items() if run == "gpt"][-1]
    where = places(healthy.objects)["stored bytes"]
    for key, first, end in where:
        torn = bytearray(healthy.objects[key])
        torn[(first + end) // 2] ^= 4
        storage = damaged(healthy.objects, key, bytes(torn))
        if try_all(storage, healthy)[last] is None:
            continue
        with reopen(storage) as store:
            again = store.run("gpt").save(state_of(healthy.seeds[last]), step=9)
            report = store.verify()
            assert {last, again.id} <= set(report.damaged_versions)
            with pytest.raises(IntegrityError, match="tensor "):
                load_id(store, again)
        return
    pytest.fail("no chunk of the last version was hit")
