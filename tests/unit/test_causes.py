"""A failed load tells damage from deletion, from a move, and from writes into its own target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends.base import Buffers
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import (
    CkptStoreError,
    ConflictError,
    CorruptTensorError,
    InvalidInputError,
    TornStateError,
    VersionNotFoundError,
)
from ckptstore.repo import create_on


class _Between(WrapperBackend):
    """Calls a function once, before or after a pack is read."""

    before: Callable[[], object] | None = None
    after: Callable[[Sequence[memoryview]], object] | None = None

    def read_into(self, key: str, offset: int, buffers: Buffers) -> None:
        """Read, with what comes between."""
        before, self.before = self.before, None
        if before is not None:
            before()
        self.inner.read_into(key, offset, buffers)
        after, self.after = self.after, None
        if after is not None:
            after(buffers)


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> _Between:
    """Return storage with a hook."""
    return _Between(MemoryBackend(f"causes/{request.node.nodeid}"))


@pytest.fixture
def store(storage: _Between) -> ckptstore.Store:
    """Return a store of two versions that share nothing."""
    store = ckptstore.Store(create_on(storage))
    for step in (1, 2):
        store.run("r").save({"w": torch.randn(5000), "step": step}, step=step, codec="raw")
    return store


def _collect(store: ckptstore.Store) -> None:
    for _ in range(2):
        store.gc(grace_s=0, orphan_age_s=0)


def _delete(store: ckptstore.Store) -> None:
    store.remove(["r@1"])
    _collect(store)


def _keep_the_record(store: ckptstore.Store) -> None:
    store.age(["r@1"], "record")
    _collect(store)


def _move(store: ckptstore.Store) -> None:
    """Round the weights of a version, which then lie in a pack of their own."""
    store.age(["r@1"], "weights-bf16", lossy="bf16")
    _collect(store)


CHANGES: dict[str, tuple[Callable[[ckptstore.Store], object], type[CkptStoreError], str]] = {
    "deleted": (_delete, VersionNotFoundError, "was deleted while it was read"),
    "reduced": (_keep_the_record, VersionNotFoundError, "was reduced to its record while"),
    "moved": (_move, ConflictError, "was moved while it was read"),
}
LOADS: dict[str, Callable[[ckptstore.Store], Any]] = {
    "load": lambda store: store.load("r@1"),
    "into": lambda store: store.load("r@1", into={"w": torch.zeros(5000), "step": 0}),
    "load_into": lambda store: store.load_into("r@1", {"w": torch.zeros(5000)}),
    "lazy": lambda store: store.version("r@1")["w"].load(),
    "slice": lambda store: store.version("r@1")["w"][5:9],
    "lazy state": lambda store: store.version("r@1").load(),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("how", LOADS)
@pytest.mark.short("load-|slice")
def test_a_version_that_changed_meanwhile_is_not_damaged(
    store: ckptstore.Store, storage: _Between, how: str, what: str
) -> None:
    """A trainer that rolls back on damage need not: the error names what became of it."""
    change, kind, said = CHANGES[what]
    storage.before = lambda: change(store)
    with pytest.raises(kind, match=rf"r@1.* {said}"):
        LOADS[how](store)
    assert store.verify().ok


def test_a_pack_that_is_gone_is_damage(store: ckptstore.Store, storage: _Between) -> None:
    """Of a version that nobody deleted."""
    for info in list(storage.list("packs/")):
        storage.delete(info.key)
    for load in LOADS.values():
        with pytest.raises(CorruptTensorError, match="the pack is gone"):
            load(store)


@pytest.mark.parametrize("codec", ["raw", "planes", "zstd"])
def test_a_target_that_another_thread_changes_is_not_damage(
    storage: _Between, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored proves sound on a second look, and the error names the tensor."""
    store = ckptstore.Store(create_on(storage))
    store.run("r").save({"w": torch.arange(50_000.0)}, step=1, codec=codec)
    target = torch.zeros(50_000)
    if codec == "raw":
        storage.after = lambda _: target.fill_(7.0)
    else:
        from ckptstore.objects import piece_reader

        decode, told = piece_reader._decode, [1]

        def changing(*given: Any) -> None:  # noqa: ANN401 - as the function takes
            decode(*given)
            if told:
                told.pop()
                target.fill_(7.0)

        monkeypatch.setattr(piece_reader, "_decode", changing)
    with pytest.raises(TornStateError, match=r"tensor w: .* what is stored is sound"):
        store.load("r@1", into={"w": target})
    assert torch.equal(store.load("r@1")["w"], torch.arange(50_000.0))


@pytest.mark.parametrize(
    "target",
    [torch.zeros(7), torch.zeros(5000, dtype=torch.int32), torch.zeros(5000).to("meta")],
    ids=["shape", "dtype", "meta"],
)
def test_a_target_that_does_not_fit_is_the_callers(
    store: ckptstore.Store, storage: _Between, target: object
) -> None:
    """Refused before anything is read, by its name."""
    storage.before = lambda: pytest.fail("something was read")
    with pytest.raises(InvalidInputError, match="w"):
        store.load("r@1", into={"w": target, "step": 0})


def test_latest_valid_passes_over_what_was_deleted(
    store: ckptstore.Store, storage: _Between
) -> None:
    """It goes on with the version before, and calls nothing damaged."""

    def delete() -> None:
        store.remove(["r@2"], force=True)
        _collect(store)

    storage.before = delete
    assert store.load("r@latest-valid")["step"] == 1
