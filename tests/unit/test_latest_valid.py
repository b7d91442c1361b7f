"""``latest-valid``: the newest sound version, and loud about what it skips."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from damaging import flip_pack

import ckptstore
from ckptstore.catalog.refs import parse_ref, resolve
from ckptstore.errors import (
    CorruptObjectError,
    InvalidRefError,
    RunNotFoundError,
    VersionNotFoundError,
)
from ckptstore.model import Version


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return where the store of a test is."""
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[ckptstore.Store]:
    """Return a store with a run of four versions."""
    torch.manual_seed(2)
    with ckptstore.open(root, create=True) as opened:
        for step in (1, 2, 3, 4):
            opened.run("gpt").save({"model": {"w": torch.randn(200, 200)}, "step": step}, step=step)
        yield opened


def damage_data(root: Path, version: Version) -> None:
    """Flip a bit in the pack that a version alone wrote."""
    packs = sorted(root.glob("packs/*/*.pack"), key=lambda path: path.stat().st_mtime_ns)
    flip_pack(packs[version.step - 1])


def cut_manifest(root: Path, version: Version) -> None:
    """Cut the end of a version's manifest."""
    path = root / version.manifest_key
    path.write_bytes(path.read_bytes()[:-1])


def test_without_damage_it_is_the_latest(
    store: ckptstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The head, and not a word, by every way to ask."""
    run = store.run("gpt")
    assert run.load("latest-valid")["step"] == 4
    assert store.load("gpt@latest-valid")["step"] == 4
    assert store.resolve("gpt@latest-valid") == run.resolve("latest-valid") == run.head
    assert run.latest_valid().skipped == ()
    assert caplog.text == ""


def test_what_is_damaged_is_skipped_loudly(
    root: Path, store: ckptstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged data and a damaged manifest are skipped, each with a warning that names it."""
    run = store.run("gpt")
    cut_manifest(root, run.resolve(4))
    damage_data(root, run.resolve(3))

    with ckptstore.open(root) as fresh:
        run = fresh.run("gpt")
        assert run.load("latest-valid")["step"] == 2
        warned = [record.getMessage() for record in caplog.records]
        assert [("gpt@4" in warned[0], "gpt@3" in warned[1])] == [(True, True)]
        found = run.latest_valid()
        assert found.version.step == 2
        assert [skipped.version.step for skipped in found.skipped] == [4, 3]
        assert "model.w" in found.skipped[1].why
        assert fresh.version("gpt@latest-valid").step == 2
        # The part that is asked for decides what a load skips.
        assert run.load("latest-valid", include=["model.*"])["model"]["w"].shape == (200, 200)
        target = {"model": {"w": torch.zeros(200, 200)}, "step": 0}
        assert run.load("latest-valid", into=target)["step"] == 2
        assert torch.equal(target["model"]["w"], run.load(2)["model"]["w"])  # type: ignore[index]


def test_if_none_is_sound_the_error_lists_all(root: Path, store: ckptstore.Store) -> None:
    """No version is better than a wrong one; every reason is told."""
    for version in store.versions():
        cut_manifest(root, version)
    with ckptstore.open(root) as fresh:
        for ask in (
            lambda: fresh.run("gpt").load("latest-valid"),
            lambda: fresh.resolve("gpt@latest-valid"),
        ):
            with pytest.raises(CorruptObjectError, match=r"@4 .*@3 .*@2 .*@1 ") as caught:
                ask()
            assert "repair" in caught.value.hint


def test_only_the_line_of_the_run_counts(store: ckptstore.Store) -> None:
    """After a rollback it is the target, not what was abandoned; no run is an error of its own."""
    store.run("gpt").rollback(2)
    assert store.resolve("gpt@latest-valid").step == 2
    with pytest.raises(RunNotFoundError):
        store.resolve("nobody@latest-valid")
    store.remove(["gpt@1", "gpt@2", "gpt@3", "gpt@4"], force=True)
    with pytest.raises(VersionNotFoundError, match="could be loaded"):
        store.resolve("gpt@latest-valid")


def test_the_catalog_alone_does_not_know(store: ckptstore.Store) -> None:
    """The grammar takes it, the pure resolver says who can tell, and no tag can have the name."""
    ref = parse_ref("gpt@latest-valid")
    assert (ref.kind, ref.run) == ("valid", "gpt")
    with pytest.raises(InvalidRefError, match="catalog alone"):
        resolve(store.repo.catalog, ref)
    with pytest.raises(ckptstore.CkptStoreError, match="meaning of its own"):
        store.tag("gpt", "latest-valid")
