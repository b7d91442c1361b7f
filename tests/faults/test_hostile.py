"""A store that somebody made to do harm: typed errors, little memory, nothing executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faultkit.lies import LIES, MARKER
from faultkit.states import differences, state_of
from faultkit.stores import contents, create, memory_with, trusting

from ckptstore import errors
from ckptstore.backends.registry import open_backend
from ckptstore.errors import CkptStoreError
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store

# What one hostile store may cost, besides a save of some 200 kB. Source: a chunk and its source may
# take 64 MiB each (CHUNK_RAW_BYTES_MAX), records up to 300 MB are built here on purpose.
PEAK_KIB_MAX = 400 * 1024


@pytest.fixture(scope="module")
def met(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return what came of meeting each hostile store in a process with bounded memory."""
    folder = tmp_path_factory.mktemp("hostile")
    chosen = {item.nodeid for item in request.session.items}
    test = f"{request.node.nodeid}::test_a_hostile_store_gives_typed_errors_in_bounded_memory"
    lies = [name for name in sorted(LIES) if f"{test}[{name}]" in chosen]
    done = subprocess.run(
        [sys.executable, "-m", "faultkit.hostile_child"],
        cwd=folder,
        input=json.dumps(lies).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    found["(files)"] = {"names": [path.name for path in folder.iterdir()]}
    return found


def test_nothing_that_was_stored_is_executed(met: dict[str, dict[str, Any]]) -> None:
    """None of the pickles in every place of a store left its mark."""
    assert MARKER not in met["(files)"]["names"]


def test_the_store_that_is_told_lies_of_is_healthy(met: dict[str, dict[str, Any]]) -> None:
    """Without a lie everything works, so that the failures below mean something."""
    actions = {name: value for name, value in met["(healthy)"].items() if name != "peak_kib"}
    assert set(actions.values()) == {"ok"}


@pytest.mark.short(sample=50)
@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_hostile_store_gives_typed_errors_in_bounded_memory(
    met: dict[str, dict[str, Any]], lie: str
) -> None:
    """Whatever a record says: loading raises an error of the tree, and nothing else ever comes."""
    results = dict(met[lie])
    peak = results.pop("peak_kib")
    foreign = {action: text for action, text in results.items() if text.startswith("foreign")}
    assert not foreign, "\n".join(foreign.values())
    assert issubclass(getattr(errors, results["load"]), CkptStoreError), results
    assert peak < PEAK_KIB_MAX


# --- a hostile folder -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a store of one version, of state 1."""
    root = tmp_path / "store"
    with Store(create_on(open_backend(root), prober=trusting)) as store:
        store.run("gpt").save(state_of(1), step=1)
    return root


def meet_folder(root: Path) -> CkptStoreError | None:
    """Load, list and verify; return the error of the load, None where the bits are right."""
    failure: CkptStoreError | None = None
    for action in ("load", "verify", "list"):
        try:
            with Store(open_on(open_backend(root), prober=trusting)) as store:
                if action == "load":
                    assert differences(store.load("gpt"), state_of(1)) == []
                elif action == "verify":
                    store.verify()
                else:
                    store.stats()
        except CkptStoreError as error:
            if action == "load":
                failure = error
    return failure


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["store.json", "commits", "manifests", "packs"])
@pytest.mark.parametrize("trick", ["link", "device", "loop", "pipe", "folder", "missing"])
def test_names_in_a_folder_that_are_no_files_are_refused(
    folder: Path, kind: str, trick: str
) -> None:
    """A symbolic link, pipe or folder in the place of an object is never read, and never hangs."""
    top = folder / kind
    target = top if top.is_file() else next(p for p in sorted(top.rglob("*")) if p.is_file())
    aside = folder.parent / "aside"
    target.rename(aside)
    if trick == "link":
        target.symlink_to(aside)
    elif trick == "device":
        target.symlink_to("/dev/zero")
    elif trick == "loop":
        target.symlink_to(target.name)
    elif trick == "pipe":
        os.mkfifo(target)
    elif trick == "folder":
        target.mkdir()

    failure = meet_folder(folder)

    assert isinstance(failure, CkptStoreError)


@pytest.mark.timeout(600)
def test_other_names_in_a_folder_do_not_matter(folder: Path) -> None:
    """What is not named as an object is left alone: files of others, temporary files, odd names."""
    for place in ("", "commits/", "commits/000000/", "packs/", "manifests/", "snapshots/"):
        (folder / place).mkdir(exist_ok=True)
        for name in (".tmp-0", "README", "x y", "000000000009.json~", "-rf", "ä", "UPPER.pack"):
            (folder / f"{place}{name}").write_bytes(b"whatever")
    (folder / "commits" / "zz").symlink_to("/etc")
    (folder / "packs" / "loop").symlink_to("..")

    assert meet_folder(folder) is None


@pytest.mark.parametrize(
    "key",
    [
        "commits/000000/000000000000.json", "commits/000001/000000000002.json",
        "commits/000000/000000000002.json.bak", "commits/000000/2.json",
        "snapshots/000000000002.snap.old", "snapshots/999999999999.snap",
        "snapshots/000000000000.snap", "packs/00/11.pack",
    ],
)  # fmt: skip
def test_objects_with_names_like_those_of_the_store_do_not_matter(key: str) -> None:
    """A key that is not exactly one of the layout's is no commit and no snapshot."""
    backend = memory_with({})
    with create(backend) as store:
        store.run("gpt").save(state_of(1), step=1)
    other = memory_with({**contents(backend), key: b"whatever"})

    with create(other) as store:
        assert differences(store.load("gpt"), state_of(1)) == []
        assert store.run("gpt").save(state_of(2), step=2).commit == 2
