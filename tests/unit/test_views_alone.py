"""A part of a version costs a part: views without their base, and a name of many."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from metered import MeteredBackend

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.repo import create_on

BASE = torch.arange(600_000.0).view(600, 1000)
CUBE = torch.arange(240.0).view(4, 6, 10)
WIDE = torch.randn(50, 60, dtype=torch.complex64)

VIEWS: dict[str, torch.Tensor] = {
    "row": BASE[7],
    "rows": BASE[20:24],
    "column": BASE[:, 7],
    "columns": BASE[:, 3:9],
    "tile": BASE[10:30, 20:40],
    "every other": BASE[::2, 3],
    "turned": BASE.t()[5:9],
    "element": BASE[3, 4],
    "flat": BASE.view(-1)[1500:4500],
    "expanded": BASE[5].expand(4, 1000),
    "windows": BASE.view(-1)[:100].unfold(0, 10, 3),
    "strange": BASE.as_strided((10, 10), (1001, 7), 13),
    "bits": BASE[3].view(torch.int32),
    "slab": CUBE[1:3, :, 5],
    "permuted": CUBE.permute(2, 0, 1)[2:5],
    "parameter": torch.nn.Parameter(BASE[9]),
    "real": WIDE.real[3:5],
    "pairs": torch.view_as_complex(BASE.view(600, 500, 2))[5:9],
    "empty": BASE[3:3],
}


@pytest.fixture
def meter(memory: MemoryBackend) -> MeteredBackend:
    """Return a metered store with tensors, and views of them."""
    with ckptstore.Store(create_on(memory, options=Options(codec="raw"))) as store:
        bases = {"base": BASE, "cube": CUBE, "wide": WIDE}
        store.run("r").save({**bases, "views": VIEWS, "a": BASE[:9], "b": BASE[5:12]}, step=1)
    return MeteredBackend(memory)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("way", ["include", "into", "lazy", "slice", "load_into"])
def test_a_view_alone_has_memory_of_its_own(meter: MeteredBackend, name: str, way: str) -> None:
    """With its values, and with no more bytes below it than it covers."""
    view = VIEWS[name].detach()
    path = f"views.{name}"
    with ckptstore.Store(create_on(meter, exist_ok=True)) as store:
        if way == "include":
            found = store.load("r", include=[path])["views"][name]
        elif way == "lazy":
            found = store.version("r")[path].load()
        elif way == "slice":
            lazy = store.version("r")[path]
            assert (lazy.shape, lazy.nbytes) == (tuple(view.shape), view.nbytes)
            index: Any = slice(1, 3) if view.dim() and len(view) > 3 else ...
            found, view = lazy[index], view[index]
        else:
            target = {"views": {name: torch.zeros(view.shape, dtype=view.dtype)}}
            if way == "into":
                store.load("r", include=[path], into=target)
            else:
                store.load_into("r", target, include=[path], strict=True)
            found = target["views"][name]

    assert torch.equal(found, view)
    gappy = name in {"strange", "windows"}
    assert found.untyped_storage().nbytes() <= (BASE.nbytes // 10 if gappy else view.nbytes)


def test_only_pieces_of_a_view_are_read(meter: MeteredBackend) -> None:
    """A row of a tensor in many pieces costs one of them."""
    large = torch.zeros(4000, 4000)
    with ckptstore.Store(create_on(meter, exist_ok=True)) as store:
        store.run("l").save({"large": large, "row": large[7]}, step=1)
        before = meter.snapshot()["read_into"].bytes_moved if "read_into" in meter.snapshot() else 0
        assert not store.load("l", include=["row"])["row"].any()
    assert meter.snapshot()["read_into"].bytes_moved - before < large.nbytes / 3


def test_views_that_overlap_share_their_memory(meter: MeteredBackend) -> None:
    """Without their base too; it has the bytes of both, and no more."""
    with ckptstore.Store(create_on(meter, exist_ok=True)) as store:
        found = store.load("r", include=["a", "b"])
    assert found["a"][5:].data_ptr() == found["b"].data_ptr()
    assert found["a"].untyped_storage().nbytes() == BASE[:12].nbytes
    assert torch.equal(found["b"], BASE[5:12])


def _calls(work: Callable[[], object]) -> int:
    """Return how many functions are called in a piece of work."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_work_by_name_costs_the_same_among_many_names(memory: MemoryBackend) -> None:
    """After the first access, which sorts the names: counted in calls of functions."""
    store = ckptstore.Store(create_on(memory))
    one = torch.zeros(1)
    calls = []
    for count in (10, 5_000):
        flat = {f"layer{n}.w": one for n in range(count)}
        store.run("r").save({"model": flat}, step=count)
        lazy = store.version(f"r@{count}")
        works = (
            lambda lazy=lazy: lazy["model.layer5.w"],
            lambda lazy=lazy: "model.layer5.w" in lazy,
            lambda lazy=lazy: "model.layer5" in lazy,
            lambda lazy=lazy: lazy["model.layer5.w"].load(),
        )
        for work in works:
            work()
        calls.append([_calls(work) for work in works])
    assert [abs(few - many) < 20 for few, many in zip(*calls, strict=True)] == [True] * 4
