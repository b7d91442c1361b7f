"""Replicas whose log anybody may have written: names of replicas, and manifests of versions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends import registry
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Move, relocate
from ckptstore.catalog.replica_ops import NameReplica
from ckptstore.catalog.state import Op
from ckptstore.errors import (
    CorruptObjectError,
    InvalidInputError,
    InvalidUrlError,
    ReplicaChangedError,
    VersionNotFoundError,
)
from ckptstore.manifests import relied_on
from ckptstore.replicas.options import same_place
from ckptstore.store.opening import open_target_of


@pytest.mark.parametrize("head", ["reference::file", "simplecache::file", "zip://x.zip::file"])
def test_a_log_starts_no_chain_of_file_systems(tmp_path: Path, head: str) -> None:
    """What the log calls a replica makes fsspec fetch and interpret nothing."""
    there = tmp_path / "there"
    there.write_text("{}")
    named = NameReplica(name="cold", url=f"{head}://{there}", store="0" * 32)
    with ckptstore.open(tmp_path / "s", create=True) as store:
        store.repo.log.append_any(lambda _: [named])
        with pytest.raises(InvalidUrlError, match="chain"):
            store.replica("cold")


def test_who_gives_options_for_a_chain_means_it(tmp_path: Path) -> None:
    """The user, unlike the log, may name any file system that there is."""
    with ckptstore.open(tmp_path / "there", create=True) as there:
        store_id = there.info.store_id
    url = f"simplecache::file://{tmp_path / 'there'}"
    with ckptstore.open(tmp_path / "s", create=True) as store:
        named = NameReplica(name="cold", url=url, store=store_id)
        store.repo.log.append_any(lambda _: [named])
    for meant in ({}, {"read_only": True}):
        with (
            ckptstore.open(tmp_path / "s", replicas={"cold": meant}, read_only=True) as store,
            pytest.raises(InvalidUrlError, match="chain") as caught,
        ):
            store.replica("cold")
        assert f"--to-option url={url}" in caught.value.hint
    with ckptstore.open(tmp_path / "s", replicas={"cold": {"url": url}}, read_only=True) as store:
        assert store.replica("cold").info.store_id == store_id


class _Asked:
    """A storage of a third party, to which secrets would go."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, object]]] = []

    def __call__(self, url: str, **options: object) -> MemoryBackend:
        self.asked.append((url, options))
        backend = MemoryBackend(url.partition("://")[2].rstrip("/"))
        backend.url = url.rstrip("/")
        return backend


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> _Asked:
    """Return what is asked of ``safe://`` and ``evil://``, which take a password."""
    asked = _Asked()
    monkeypatch.setattr(sys.modules[__name__], "open_asked", asked)
    for scheme in ("safe", "evil"):
        monkeypatch.setitem(registry.FACTORIES, scheme, f"{__name__}:open_asked")
    return asked


def open_asked(url: str, **options: object) -> MemoryBackend:
    """Stand in the place of the fixture's object."""
    raise AssertionError


def _named(named: NameReplica, _: Catalog) -> list[Op]:
    return [named]


def _redirected(tmp_path: Path, asked: _Asked) -> tuple[str, str]:
    """Make a store whose log names a place for ``cold`` other than it was; return both."""
    name = tmp_path.name
    good, bad = f"safe://good-{name}", f"evil://bad-{name}"
    with ckptstore.open(good, create=True) as there:
        store_id = there.info.store_id
    superblock = MemoryBackend(f"good-{name}").get("store.json", bytes_max=1 << 20)
    MemoryBackend(f"bad-{name}").put("store.json", superblock)  # the same id
    with ckptstore.open(tmp_path / "s", create=True) as store:
        store.run("gpt").save({"w": [1.0]}, step=1)
        for url in (good, bad):
            named = NameReplica(name="cold", url=url, store=store_id)
            store.repo.log.append_any(partial(_named, named))
    asked.asked.clear()
    return good, bad


def test_a_log_sends_options_nowhere(tmp_path: Path, asked: _Asked) -> None:
    """Who changes the place in the log gets no password, and nothing that is saved."""
    good, bad = _redirected(tmp_path, asked)
    given = {"cold": {"url": good, "password": "hunter2"}}
    with ckptstore.open(tmp_path / "s", replicas=given) as store:
        with pytest.raises(ReplicaChangedError, match="are for safe://") as caught:
            store.replica("cold")
        with pytest.raises(ReplicaChangedError):
            store.replicate("replica:cold")
        store.give_options("cold", {"url": good, "password": "x"})
        with pytest.raises(ReplicaChangedError):
            store.replica("cold")
    assert asked.asked == []
    assert "hunter2" not in str(caught.value)
    assert bad in str(caught.value)

    # It did move there, and the user says so.
    given = {"cold": {"url": bad + "/", "password": "hunter2"}}
    with ckptstore.open(tmp_path / "s", replicas=given) as store:
        assert store.replica("cold").url
    assert asked.asked == [(bad, {"password": "hunter2"})]


@pytest.mark.parametrize("options", [{"password": "x"}, {"key": "x", "secret": "y"}], ids=str)
def test_options_without_a_place_are_refused(
    tmp_path: Path, asked: _Asked, options: dict[str, Any]
) -> None:
    """At once, wherever they are given; the values are not shown."""
    _redirected(tmp_path, asked)
    with pytest.raises(InvalidInputError, match="for which place") as caught:
        ckptstore.open(tmp_path / "s", replicas={"cold": options})
    assert "'url'" in caught.value.hint
    assert ", ".join(options) in caught.value.message
    with ckptstore.open(tmp_path / "s") as store:
        with pytest.raises(InvalidInputError, match="for which place"):
            store.give_options("cold", options)
        with pytest.raises(InvalidInputError, match="is no text"):
            store.give_options("cold", {"url": 1, **options})
        with (
            pytest.raises(InvalidInputError, match="for which place"),
            open_target_of(store, "replica:cold", dry_run=True, **options),
        ):
            pass
        with (
            pytest.raises(InvalidInputError, match="goes with replica:NAME"),
            open_target_of(store, str(tmp_path / "t"), dry_run=True, url="x"),
        ):
            pass
    assert asked.asked == []


def test_what_goes_to_no_storage_needs_no_place(tmp_path: Path, asked: _Asked) -> None:
    """Limits of this process and a key, which is sent to nobody."""
    _, bad = _redirected(tmp_path, asked)
    given = {"cold": {"workers": 2, "read_only": True}}
    with ckptstore.open(tmp_path / "s", replicas=given) as store:
        assert store.replica("cold").url
    assert asked.asked == [(bad, {})]


def test_a_replica_that_is_moved_while_it_is_open(tmp_path: Path, asked: _Asked) -> None:
    """The options with which it was named here stay with the place that it was named for."""
    place = f"safe://moved-{tmp_path.name}"
    with ckptstore.open(tmp_path / "s", create=True) as store:
        secret = {"password": "hunter2"}
        added = store.add_replica("cold", place, create=True, **secret)
        assert store.replica("cold").info.store_id == added.store
        asked.asked.clear()
        named = NameReplica(name="cold", url=f"evil://{tmp_path.name}", store=added.store)
        with ckptstore.open(tmp_path / "s") as other:
            other.repo.log.append_any(lambda _: [named])
        with pytest.raises(ReplicaChangedError, match="evil://"):
            store.replica("cold")
    assert asked.asked == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("s3://b/p", "s3://b/p/", True), ("s3://b/p", "s3a://b/p", True),
        ("gs://b/p", "gcs://b/p", True), ("s3://b/p", "s3://b/p2", False),
        ("s3://b/p", "gs://b/p", False), ("s3://b/p", "S3://b/p", True),
        ("/a/b", "file:///a/b", True), ("/a/b c", "file:///a/b%20c", True),
        ("/a/b", "file://localhost/a/b", True), ("/a/b/", "/a/b", True), ("/a/b", "/a/c", False),
        ("simplecache::s3://b", "s3://b", False), ("http://h/p", "http://h:80/p", False),
    ],
)  # fmt: skip
def test_which_places_are_one(one: str, other: str, same: bool) -> None:
    """By what they say; what is in doubt is another place."""
    assert same_place(one, other) is same
    assert same_place(other, one) is same


# --- manifests of other versions ------------------------------------------------------------------


@pytest.fixture
def swapped(tmp_path: Path) -> Iterator[ckptstore.Store]:
    """Return a store of two versions; the log of its replica names the first state for both.

    All digests in the replica are right: only the content is not what the second was saved with.
    """
    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        run = hot.run("gpt")
        for step in (1, 2):
            run.save({"w": torch.full((40_000,), float(step))}, step=step)
        run.save({"w": torch.zeros(1)}, step=3)
        hot.add_replica("cold", tmp_path / "cold", create=True)
        hot.replicate("replica:cold")
        with ckptstore.open(tmp_path / "cold") as cold:
            first, second = (cold.resolve(f"gpt@{step}") for step in (1, 2))
            manifest = replace(cold.repo.manifests.load(first), version=second.id)
            pointer = cold.repo.manifests.put(manifest)
            move = Move(
                version=second.id,
                based_on=second.manifest_digest,
                level="full",
                manifest=pointer,
                content=second.content,
                roles=second.roles,
                relies_on=relied_on(pointer, manifest),
            )
            cold.repo.log.append_any(lambda now: relocate(now, [move]))
        yield hot


@pytest.mark.parametrize("gone", ["evicted", "manifest"])
def test_a_load_takes_no_other_state_from_a_replica(
    swapped: ckptstore.Store, tmp_path: Path, gone: str
) -> None:
    """Of a version that is not here a load fails and says why; of the other it falls through."""
    if gone == "evicted":
        swapped.age(["gpt@1", "gpt@2"], "record")
    else:
        for step in (1, 2):
            (tmp_path / "hot" / swapped.resolve(f"gpt@{step}").manifest_key).unlink()
    with (
        ckptstore.open(tmp_path / "hot") as store,
        pytest.raises((VersionNotFoundError, CorruptObjectError), match="not of the state that"),
    ):
        store.load("gpt@2")
    with ckptstore.open(tmp_path / "hot") as store:
        assert torch.equal(store.load("gpt@1")["w"], torch.ones(40_000))


def test_a_replica_s_other_state_is_not_replicated(
    swapped: ckptstore.Store, tmp_path: Path
) -> None:
    """From the replica to a third store: the version fails by name, and the others come."""
    with (
        ckptstore.open(tmp_path / "cold") as cold,
        ckptstore.open(tmp_path / "third", create=True) as third,
    ):
        report = cold.replicate(third)
        (failure,) = report.failures
        assert failure.version == swapped.resolve("gpt@2").id
        assert "not of the state that the log names" in failure.message
        assert third.resolve("gpt@2").level == "record"
        assert torch.equal(third.load("gpt@1")["w"], torch.ones(40_000))


def test_a_repair_takes_no_other_state_from_a_replica(
    swapped: ckptstore.Store, tmp_path: Path
) -> None:
    """Manifests that are lost here: one comes back, the other stays lost, and nothing is wrong."""
    for step in (1, 2):
        (tmp_path / "hot" / swapped.resolve(f"gpt@{step}").manifest_key).unlink()
    with ckptstore.open(tmp_path / "hot") as store, ckptstore.open(tmp_path / "cold") as cold:
        report = store.repair(cold)
        assert [lost.step for lost in report.lost] == [2]
        assert [mended.step for mended in report.mended] == [1]
        assert torch.equal(store.load("gpt@1", fall_through=False)["w"], torch.ones(40_000))
        with pytest.raises(CorruptObjectError):
            store.load("gpt@2", fall_through=False)
