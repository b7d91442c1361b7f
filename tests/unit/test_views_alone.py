"""A part of a version costs a part: views without their base, and a name of many."""

from __future__ import annotations

import copy
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
    "row": BASE[7], "rows": BASE[20:24], "column": BASE[:, 7], "columns": BASE[:, 3:9],
    "tile": BASE[10:30, 20:40], "every other": BASE[::2, 3], "turned": BASE.t()[5:9],
    "element": BASE[3, 4], "flat": BASE.view(-1)[1500:4500], "expanded": BASE[5].expand(4, 1000),
    "windows": BASE.view(-1)[:100].unfold(0, 10, 3),
    "strange": BASE.as_strided((10, 10), (1001, 7), 13), "bits": BASE[3].view(torch.int32),
    "slab": CUBE[1:3, :, 5], "permuted": CUBE.permute(2, 0, 1)[2:5],
    "parameter": torch.nn.Parameter(BASE[9]), "real": WIDE.real[3:5],
    "pairs": torch.view_as_complex(BASE.view(600, 500, 2))[5:9], "empty": BASE[3:3],
}  # fmt: skip

GROUPS: dict[str, tuple[list[torch.Tensor], int]] = {
    "overlapping rows": ([BASE[:9], BASE[5:12]], BASE[:12].nbytes),
    "columns apart": (list(BASE[:, :900].chunk(3, 1)), BASE[:, :900].nbytes),
    "columns that meet": ([BASE[:, 3:7], BASE[:, 5:9], BASE[:, 11]], 7 * 600 * 4),
    "tiles": ([BASE[:9, :5], BASE[:9, 7:8], BASE[20:22, 4:9]], (45 + 9 + 10) * 4),
    "middles": ([CUBE[:, 1:3], CUBE[:, 4:6]], 160 * 4),
    "a row and a column": ([BASE[7, :9], BASE[5:9, 3]], 3004 * 4),
    "turned": ([BASE[2:5, 3:9], BASE.t()[3:9, 2:5]], 18 * 4),
    "empty ones": ([BASE[3:3], BASE[:, :0], BASE[:2, 4], BASE[0:1, 7:7]], 2 * 4),
    "other bits": ([BASE[3].view(torch.int32), BASE[3:4, 5:7]], 4000),
}


@pytest.fixture(scope="module")
def meter() -> MeteredBackend:
    """Return a metered store with tensors, and views of them."""
    meter = MeteredBackend(MemoryBackend("views"))
    with ckptstore.Store(create_on(meter, options=Options(codec="raw"))) as store:
        bases = {"base": BASE, "cube": CUBE, "wide": WIDE}
        store.run("r").save({**bases, "views": VIEWS, "groups": GROUPS}, step=1)
    return meter


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_alone_has_memory_of_its_own(meter: MeteredBackend, name: str) -> None:
    """With its values, and with no more bytes below it than it covers."""
    view, path = VIEWS[name].detach(), f"views.{name}"
    part: Any = slice(1, 3) if view.dim() and len(view) > 3 else ...
    with ckptstore.Store(create_on(meter, exist_ok=True)) as store:
        lazy = store.version("r")[path]
        found = [store.load("r", include=[path])["views"][name], lazy.load(), lazy[part]]
        targets = [{"views": {name: torch.zeros(view.shape, dtype=view.dtype)}} for _ in range(2)]
        store.load("r", include=[path], into=targets[0])
        store.load_into("r", targets[1], include=[path], strict=True)

    assert (lazy.shape, lazy.nbytes) == (tuple(view.shape), view.nbytes)
    for one, values in zip(found, (view, view, view[part]), strict=True):
        assert torch.equal(one, values)
        gappy = name in {"strange", "windows"}
        assert one.untyped_storage().nbytes() <= (BASE.nbytes // 10 if gappy else values.nbytes)
    assert all(torch.equal(target["views"][name], view) for target in targets)


def test_only_pieces_of_a_view_are_read(meter: MeteredBackend) -> None:
    """A row of a tensor in many pieces costs one of them."""
    large = torch.zeros(4000, 4000)
    with ckptstore.Store(create_on(meter, exist_ok=True)) as store:
        store.run("l").save({"large": large, "row": large[7]}, step=1)
        before = meter.snapshot()["read_into"].bytes_moved if "read_into" in meter.snapshot() else 0
        assert not store.load("l", include=["row"])["row"].any()
    assert meter.snapshot()["read_into"].bytes_moved - before < large.nbytes / 3


@pytest.mark.parametrize("name", GROUPS)
def test_views_that_overlap_share_their_memory(meter: MeteredBackend, name: str) -> None:
    """Without their base too; together they have the bytes that they cover, and few more."""
    views, nbytes = GROUPS[name]
    with ckptstore.Store(create_on(meter, exist_ok=True)) as store:
        found = store.load("r", include=[f"groups.{name}"])["groups"][name][0]

    assert all(map(torch.equal, found, views))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}
    assert sum(storages.values()) <= nbytes + 16
    twins = copy.deepcopy(views)
    for number, pair in enumerate(zip(found, twins, strict=True)):
        assert all(one.fill_(number) is one for one in pair)
    assert all(map(torch.equal, found, twins))


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
