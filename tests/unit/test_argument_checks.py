"""Arguments out of their range: a typed error names the argument, and nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.argument_checks import check_among, check_between, integer
from ckptstore.errors import InvalidInputError, RunNotFoundError
from ckptstore.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with a run of two versions."""
    with ckptstore.open(tmp_path / "s", create=True) as opened:
        run = opened.run("r", metrics={"loss": "min"})
        for step in range(2):
            run.save({"w": torch.ones(4) * step}, step=step, metrics={"loss": float(step)})
        yield opened


_WRONG: list[tuple[str, Callable[[Any], object]]] = [
    ("grace_s", lambda store: store.gc(grace_s="1")),
    ("grace_s", lambda store: store.gc(grace_s=math.nan)),
    ("orphan_age_s", lambda store: store.gc(orphan_age_s=math.inf)),
    ("repack_below", lambda store: store.gc(repack_below=1.5)),
    ("repack_below", lambda store: store.gc(repack_below="x")),
    ("workers", lambda store: store.gc(workers="x")),
    ("workers", lambda store: store.verify(workers=0)),
    ("level", lambda store: store.verify(level="Full")),
    ("level", lambda store: store.repair(level="Full")),
    ("sample", lambda store: store.verify(sample="x")),
    ("sample", lambda store: store.verify(sample=0)),
    ("n is", lambda store: store.run("r").best("loss", n=None)),
    ("n is", lambda store: store.run("r").best("loss", n=0)),
    ("metadata", lambda store: store.run("r").annotate(0, metadata=[1])),
    ("a location must be", lambda store: store.repair(source=3)),
    ("part", lambda store: store.verify(sample=0.5, part=0.5)),
    ("level", lambda store: store.age(["r@0"], level="half")),
    ("first", lambda store: store.log(first="x")),
    ("an observer", lambda store: store.observe(3)),
    ("stage", lambda store: store.run("r").save_async({}, step=7, stage="later")),
    ("if_busy", lambda store: store.run("r").save_async({}, step=7, if_busy=None)),
    ("a role", lambda store: store.run("r").save({"w": torch.ones(1)}, step=7, roles={"w": "x"})),
    ("window", lambda _: ckptstore.DivergenceGuard("loss", mode="min", window=3)),
    ("rollbacks_max", lambda _: ckptstore.DivergenceGuard("loss", mode="min", rollbacks_max=-1)),
    ("a step", lambda store: store.run("r").save({}, step=True)),
    ("keep_last", lambda store: store.run("r", keep_last=0)),
    ("patience", lambda _: ckptstore.EarlyStopping("loss", mode="min", patience=0)),
    ("min_delta", lambda _: ckptstore.EarlyStopping("loss", mode="min", min_delta=math.nan)),
]


@pytest.mark.parametrize(
    ("named", "call"), _WRONG, ids=[f"{name}-{at}" for at, (name, _) in enumerate(_WRONG)]
)
def test_a_wrong_argument_is_named_and_nothing_is_written(
    store: Store, named: str, call: Callable[[Any], object]
) -> None:
    """No call takes another value for the one that was meant, or ends in an error of Python's."""
    before = store.repo.refresh().number
    with pytest.raises(InvalidInputError, match=named):
        call(store)
    assert store.repo.refresh().number == before


def test_a_run_that_is_no_text_is_not_found(store: Store) -> None:
    """The error says which runs there are."""
    with pytest.raises(RunNotFoundError, match="there is r"):
        store.versions(run=3)  # type: ignore[arg-type]


def test_integers_of_numpy_are_stored_as_integers(tmp_path: Path) -> None:
    """Counts and sizes may come from arrays."""
    with ckptstore.open(tmp_path / "s", create=True, chunk_bytes=np.int64(1 << 20)) as store:  # type: ignore[arg-type]
        two, one = (np.int64(count) for count in (2, 1))
        run = store.run("r", metrics={"loss": "min"}, keep_last=two)  # type: ignore[arg-type]
        run.save({}, step=two, metrics={"loss": 1.0})  # type: ignore[arg-type]
        found = run.best("loss", n=one)  # type: ignore[arg-type]
    assert [version.step for version in found] == [2]


def test_a_chunk_size_is_checked_where_a_store_is_made(tmp_path: Path) -> None:
    """A text is no number of bytes; there is no store after that."""
    with pytest.raises(InvalidInputError, match="chunk_bytes"):
        ckptstore.open(tmp_path / "s", create=True, chunk_bytes="4MiB")  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists() or not any((tmp_path / "s").iterdir())


def test_numbers_of_numpy_are_numbers() -> None:
    """Checks take what Python and NumPy take for numbers, both ends included."""
    check_between("x", np.float32(0.5), 0, 1)
    check_between("x", 1, 0, 1)
    check_among("x", "b", ("a", "b"))
    assert integer("x", np.int64(7), 0, 7) == 7
    assert type(integer("x", np.int64(7))) is int
    for wrong in (True, 1.0, "1", None, 8, -1):
        with pytest.raises(InvalidInputError, match="x is an integer from 0 to 7"):
            integer("x", wrong, 0, 7)
