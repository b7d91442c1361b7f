"""Stores, runs and versions in pickles: another process opens them again, or is told why not."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.sealing import UserKey
from ckptstore.errors import InvalidInputError, StoreNotFoundError
from ckptstore.repo import create_on

STATE = {"w": torch.arange(12.0), "n": 3}


def _loaded(data: bytes) -> Any:  # noqa: ANN401 - whatever was pickled
    return pickle.loads(data)  # noqa: S301 - our own


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    """Return a store with one version, opened with options of its own."""
    with ckptstore.open(tmp_path / "a", create=True, codec="raw", workers=1) as found:
        found.run("gpt", metrics={"loss": "min"}).save(STATE, step=1, metrics={"loss": 1.0})
        yield found


def test_another_process_reads_by_it(store: ckptstore.Store, tmp_path: Path) -> None:
    """Store, run, version and lazy version are the same in a process that was started for them."""
    run, lazy = store.run("gpt"), store.version("gpt@1")
    things = tmp_path / "things"
    things.write_bytes(pickle.dumps((store, run, lazy, lazy.info)))
    code = (
        "import pickle, sys, torch\n"
        "store, run, lazy, version = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert run.load('best:loss')['n'] == 3 and run._session is store._session\n"
        "assert lazy.id == version.id == run.head.id\n"
        "assert torch.equal(lazy['w'][2:4], torch.tensor([2.0, 3.0]))\n"
        "run.save({'w': torch.zeros(3)}, step=2)\n"
        "print(store.repo.options.codec, store.repo.options.workers)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(things)], cwd="/", capture_output=True, check=False
    )
    assert done.stdout.decode().split() == ["raw", "1"], done.stderr.decode()
    assert [version.step for version in store.versions(run="gpt")] == [1, 2]


def test_many_pickles_share_one_open_store(store: ckptstore.Store) -> None:
    """Unpickled again and again, one process has one store open; closed, it is opened again."""
    data = pickle.dumps(store)
    first = _loaded(data)
    assert _loaded(data) is first
    assert _loaded(pickle.dumps(store.run("gpt")))._session is first._session
    first.close()
    second = _loaded(data)
    assert second is not first
    assert second.load("gpt@1")["n"] == 3
    second.close()
    assert store.load("gpt@1")["n"] == 3  # the one that was pickled is nobody else's


def test_a_path_holds_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative location, and that of a key, mean what they meant where they were written."""
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("0f1e" * 16)
    Path("key").chmod(0o600)
    with ckptstore.open("a", create=True, encryption_key="file:key") as store:
        store.run("gpt").save(STATE, step=1)
        data = pickle.dumps(store)
    monkeypatch.chdir("/")
    with _loaded(data) as again:
        assert again.load("gpt@1")["n"] == 3


def test_no_key_is_in_a_pickle(tmp_path: Path) -> None:
    """The place of a key travels; a key itself is refused, that of a replica too."""
    key = bytes(range(32))
    for given in (key, UserKey(key)):
        with (
            ckptstore.open(tmp_path / "a", create=True, encryption_key=given) as store,
            pytest.raises(InvalidInputError, match="its key stays here") as caught,
        ):
            pickle.dumps(store)
        assert "file:PATH" in caught.value.hint
    with (
        ckptstore.open(
            tmp_path / "b", create=True, replicas={"cold": {"encryption_key": key}}
        ) as store,
        pytest.raises(InvalidInputError, match="the key of its replica 'cold' stays"),
    ):
        pickle.dumps(store)


def test_what_no_other_process_could_open(tmp_path: Path) -> None:
    """A store in memory, on a backend of its own, or with an option that cannot travel: refused."""
    with ckptstore.open(f"memory://{tmp_path}", create=True) as store:
        store.run("gpt").save(STATE, step=1)
        for thing in (store, store.run("gpt"), store.version("gpt@1")):
            with pytest.raises(InvalidInputError, match="in the memory of this process"):
                pickle.dumps(thing)
    with (
        ckptstore.Store(create_on(MemoryBackend(f"{tmp_path}/own"))) as store,
        pytest.raises(InvalidInputError, match="a backend of its own"),
    ):
        pickle.dumps(store)
    mixed = {"memory": {"url": f"memory://{tmp_path}", "session": lambda: 1}}
    with (
        ckptstore.open(tmp_path / "c", create=True, replicas=mixed) as store,
        pytest.raises(InvalidInputError, match="an option cannot be pickled"),
    ):
        pickle.dumps(store)


def test_a_live_write_back_stays(tmp_path: Path) -> None:
    """Two processes that write back the same runs would send everything twice."""
    with ckptstore.open(tmp_path / "a", create=True) as store:
        ckptstore.open(tmp_path / "b", create=True).close()
        store.add_replica("cold", tmp_path / "b")
        pickle.dumps(store)
        store.write_back("cold")
        with pytest.raises(InvalidInputError, match="writes back"):
            pickle.dumps(store)


def test_a_tensor_alone_is_not_pickled(store: ckptstore.Store) -> None:
    """A lazy tensor says what to pickle in its place."""
    with pytest.raises(InvalidInputError) as caught:
        pickle.dumps(store.version("gpt@1")["w"])
    assert "lazy version" in caught.value.hint


def test_a_store_that_is_gone_is_an_error_of_ours(store: ckptstore.Store, tmp_path: Path) -> None:
    """Unpickling opens: what is no longer there raises as opening does."""
    data = pickle.dumps(store)
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(StoreNotFoundError):
        _loaded(data)


def test_a_forked_process_opens_its_own(store: ckptstore.Store) -> None:
    """The store that a parent has open by a pickle is not used by its child."""
    data = pickle.dumps(store)
    mine = _loaded(data)
    child = os.fork()
    if not child:
        os._exit(int(_loaded(data) is mine))
    assert os.waitpid(child, 0)[1] == 0
    mine.close()
