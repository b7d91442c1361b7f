"""Many writers of one store at once: no version is lost, and numbers have no gaps."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from faultkit.states import differences, state_of
from faultkit.stores import create, load_id, memory_with
from programs import run_program

from ckptstore.backends.registry import open_backend
from ckptstore.model import Version


def written(folder: Path, writers: int, saves: int, *, shared: bool) -> dict[str, Any]:
    """Return what processes that write at once leave behind."""
    words = [str(folder), str(writers), str(saves), str(int(shared))]
    printed = run_program("faultkit.writers_driver", *words, timeout_s=500)
    found: dict[str, Any] = json.loads(printed)
    return found


def check_written(found: dict[str, Any], writers: int, saves: int) -> None:
    """Hold that every save is there, whole, and that commits are numbered without a gap."""
    assert found["problems"] == []
    assert found["setup"] == []
    ids = [version for each in found["saved"] for version in each]
    assert len(ids) == len(set(ids)) == writers * saves
    assert set(ids) == set(found["chains"])
    assert found["numbers"] == list(range(1, writers * saves + 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_processes_save_into_eight_runs_of_one_store(tmp_path: Path) -> None:
    """8 processes x 25 saves: 200 versions, none lost, each loads, each run is one line."""
    found = written(tmp_path / "store", 8, 25, shared=False)

    check_written(found, 8, 25)
    for ids in found["saved"]:
        assert [found["chains"][version] for version in ids] == ["", *ids[:-1]]


@pytest.mark.timeout(600)
def test_processes_save_into_one_run(tmp_path: Path) -> None:
    """Writers of the same run take turns: its versions are one line, whoever saved them."""
    found = written(tmp_path / "store", 4, 10, shared=True)

    check_written(found, 4, 10)
    line = [found["heads"]["together"]]
    while found["chains"][line[-1]]:
        line.append(found["chains"][line[-1]])
    assert len(line) == 40


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_threads_save_through_one_store(kind: str, tmp_path: Path) -> None:
    """Two threads a run and three runs through one Store: every save is there and loads."""
    backend = memory_with({}) if kind == "memory" else open_backend(tmp_path / "store")
    saved: dict[int, Version] = {}
    failures: list[BaseException] = []
    with create(backend) as store:

        def work(writer: int) -> None:
            run = store.run(f"run-{writer // 2}")
            try:
                for n in range(4):
                    seed = 100 * writer + n
                    saved[seed] = run.save(state_of(seed, elements=3000), step=seed)
                    state = load_id(store, saved[seed])
                    assert differences(state, state_of(seed, elements=3000)) == []
            except BaseException as error:  # noqa: BLE001 - told below, in the test's thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(writer,)) for writer in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)

        assert failures == []
        assert not any(thread.is_alive() for thread in threads)
        versions = store.versions()
        assert {version.id for version in versions} == {v.id for v in saved.values()}
        assert sorted(v.commit for v in versions) == list(range(1, 25))
        for version in versions:
            meant = state_of(version.step, elements=3000)
            assert differences(load_id(store, version), meant) == []
        assert store.verify().ok
