"""Targets of a load: shared memory, casts and in-place writes are told, never silently wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.errors import InvalidInputError
from ckptstore.repo import create_on

ROWS = torch.arange(16.0).view(4, 4)
ROOM = 64


@pytest.fixture
def store(memory: MemoryBackend) -> ckptstore.Store:
    """Return a store in memory whose steps tie tensors in different ways."""
    store = ckptstore.Store(create_on(memory))
    for step, other in enumerate((100 + ROWS, ROWS.t(), ROWS[1:3], ROWS)):
        store.run("r").save({"a": ROWS, "b": other}, step=step)
    return store


def _negative(base: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(base)


@pytest.mark.parametrize(
    ("step", "targets", "fits"),
    [
        (0, lambda m: (m[:16].view(4, 4), m[:16].view(4, 4)), False),
        (0, lambda m: (m[:16].view(4, 4), m[:16].view(4, 4).t()), False),
        (0, lambda m: (m[:16].view(4, 4).t(), m[:16].view(4, 4).t()), False),
        (0, lambda m: (m[:16].view(4, 4), m[8:24].view(4, 4)), False),
        (0, lambda m: (m.as_strided((4, 4), (8, 2)), m.as_strided((4, 4), (8, 2), 2)), False),
        (0, lambda m: (m[:16].view(4, 4), m.as_strided((4, 4), (8, 2), 2)), False),
        (0, lambda m: (m[:16].view(4, 4), _negative(m[:16].view(4, 4))), False),
        (0, lambda m: (m.view(8, 8)[::2, :4], m.view(8, 8)[1::2, 2:6]), True),
        (0, lambda m: (m.view(8, 8)[:4, :4], m.view(8, 8)[:4, 4:]), True),
        (0, lambda m: (m.as_strided((4, 4), (8, 2)), m.as_strided((4, 4), (8, 2), 1)), True),
        (1, lambda m: (m[:16].view(4, 4), m[:16].view(4, 4).t()), True),
        (1, lambda m: (m[:16].view(4, 4), m[:16].view(4, 4)), False),
        (2, lambda m: (m[:16].view(4, 4), m[4:12].view(2, 4)), True),
        (2, lambda m: (m[:16].view(4, 4), m[8:16].view(2, 4)), False),
        (3, lambda m: (m[:16].view(4, 4).t(), m[:16].view(4, 4).t()), True),
    ],
    ids=map(str, range(15)),
)
def test_targets_are_compared_by_the_memory_that_they_cover(
    store: ckptstore.Store,
    step: int,
    targets: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    fits: bool,
) -> None:
    """Memory that would get two values is refused by both names; disjoint strides are filled."""
    saved = store.load(f"r@{step}")
    for way in ("into", "load_into"):
        a, b = targets(torch.zeros(ROOM))
        if fits:
            if way == "into":
                store.load(f"r@{step}", into={"a": a, "b": b})
            else:
                assert store.load_into(f"r@{step}", {"a": a, "b": b}, strict=True).complete
            assert torch.equal(b, saved["b"])
        elif way == "into":
            with pytest.raises(InvalidInputError, match="'a' and 'b' share memory"):
                store.load(f"r@{step}", into={"a": a, "b": b})
            assert not a.any()
            continue
        else:
            (wrong,) = store.load_into(f"r@{step}", {"a": a, "b": b}).mismatched
            assert (wrong.name, wrong.why, wrong.shared_with) == ("b", "shared", "a")
        assert torch.equal(a, saved["a"])


F32, F16, I64 = torch.float32, torch.float16, torch.int64


@pytest.mark.parametrize(
    ("values", "given", "wanted", "lost", "rounded"),
    [
        ([1.0, 2.0], F32, F16, False, 0), ([1.0000001, 1e-9], F32, F16, False, 2),
        ([65519.0], F32, F16, False, 1), ([65520.0], F32, F16, True, 0),
        ([float("inf"), float("nan")], F32, F16, False, 0),
        ([70000.0], F32, torch.bfloat16, False, 1), ([3.4e38], F32, torch.bfloat16, True, 0),
        ([448.0, 449.0], F32, torch.float8_e4m3fn, False, 1),
        ([1000.0], F32, torch.float8_e4m3fn, True, 0),
        ([float("inf")], F32, torch.float8_e4m3fn, True, 0), ([1e300], torch.float64, F32, True, 0),
        ([1e300 + 0j], torch.complex128, torch.complex64, True, 0),
        ([300, -1], I64, torch.int8, True, 0), ([127, -128], I64, torch.int8, False, 0),
        ([200], torch.uint8, torch.int8, True, 0), ([-1], torch.int8, torch.uint8, True, 0),
        ([2**24 + 1], I64, F32, False, 1), ([2**53 + 1], I64, torch.float64, False, 1),
        ([70000], I64, F16, True, 0), ([1, 0], torch.bool, F16, False, 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_cast_may_round_and_no_more(
    store: ckptstore.Store,
    values: list[Any],
    given: torch.dtype,
    wanted: torch.dtype,
    lost: bool,
    rounded: int,
) -> None:
    """Overflow, wraps and saturation leave the target alone, unless asked for; rounding counts."""
    saved = torch.tensor(values, dtype=given)
    store.run("c").save({"w": saved, "x": torch.ones(1)}, step=1)
    target = {"w": torch.zeros(len(values), dtype=wanted), "x": torch.zeros(1)}

    report = store.load_into("c", target, strict=False)

    assert [one.why for one in report.mismatched] == ["lossy"] * lost
    assert report.rounded == ({"w": rounded} if rounded else {})
    assert target["x"].item() == 1
    if lost:
        assert not target["w"].view(torch.uint8).any()
        with pytest.raises(InvalidInputError, match=r"w \(lossy") as told:
            store.load_into("c", target, strict=True)
        assert "cast='lossy'" in told.value.hint
    report = store.load_into("c", target, cast="lossy", strict=True)
    assert report.cast == {"w": (str(given)[6:], str(wanted)[6:])}
    assert torch.equal(target["w"].view(torch.uint8), saved.to(wanted).view(torch.uint8))


def test_fractions_are_lost_only_where_asked_for(store: ckptstore.Store) -> None:
    """Floats do not become integers by themselves."""
    target = {"a": torch.zeros(4, 4, dtype=torch.int32)}
    with pytest.raises(InvalidInputError, match=r"a .dtype: float32\[4, 4\] into int32"):
        store.load_into("r@0", target, include=["a"])
    store.load_into("r@0", target, include=["a"], cast="lossy")
    assert torch.equal(target["a"], ROWS.int())


def test_a_strict_cast_names_what_has_changed(memory: MemoryBackend) -> None:
    """Casts come first, and before each other tensor; those of earlier batches are named."""
    options = Options(host_bytes=64)
    store = ckptstore.Store(create_on(memory, options=options))
    store.run("r").save({"a": torch.ones(16), "b": torch.full((16,), 1e9), "c": ROWS}, step=1)
    target = {"a": torch.zeros(16, dtype=F16), "b": torch.zeros(16, dtype=F16), "c": ROWS * 0}

    with pytest.raises(InvalidInputError, match="1 have changed: a"):
        store.load_into("r", target, strict=True)

    assert target["a"].all()
    assert not target["c"].any()


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(1, 4).expand(4, 4), "expanded"),
        (lambda: torch.zeros(16).as_strided((4, 4), (1, 1)), "expanded"),
        (_inference, "an inference tensor"),
        (lambda: torch.empty(4, 4, device="meta"), "on the meta device"),
        (lambda: torch.eye(4).to_sparse(), "not a plain strided tensor"),
        (lambda: torch.nn.LazyLinear(4).weight, "not initialized"),
    ],
    ids=["expanded", "windows", "inference", "meta", "sparse", "lazy"],
)
def test_what_cannot_be_written_in_place_is_refused(
    store: ckptstore.Store, make: Callable[[], torch.Tensor], why: str
) -> None:
    """As torch would, before anything is read."""
    with pytest.raises(InvalidInputError, match=f"at 'a' .*{why}"):
        store.load("r@0", into={"a": make()})
    (wrong,) = store.load_into("r@0", {"a": make(), "b": torch.zeros(4, 4)}).mismatched
    assert why in wrong.why


def test_autograd_learns_of_a_load(store: ckptstore.Store) -> None:
    """A gradient that needs a value from before the load is an error, as with any write."""
    for load in (lambda w: store.load("r@0", into={"a": w}), lambda w: _fill(store, w)):
        weight = torch.nn.Parameter(torch.ones(4, 4))
        result = (weight * weight).sum()
        load(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(result)
    with torch.inference_mode():
        target = torch.zeros(4, 4)
        store.load("r@0", into={"a": target})
    assert torch.equal(target, ROWS)


def _fill(store: ckptstore.Store, weight: torch.Tensor) -> None:
    store.load_into("r@0", {"a": weight}, strict=False)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_load_whatever_the_default_device(
    store: ckptstore.Store, layout: str
) -> None:
    """The device that torch makes new tensors on is not theirs; arrays fill targets likewise."""
    kind = getattr(torch, f"sparse_{layout}")
    made = torch.eye(4).to_sparse(layout=kind, blocksize=(2, 2) if layout[0] == "b" else None)
    store.run("s").save({"s": made, "n": ROWS.numpy()}, step=1)
    target = {"n": torch.zeros(4, 4)}
    with torch.device("meta"):
        back = store.load("s", include=["s"])["s"]
        store.load_into("s", target, strict=False)
    assert torch.equal(back.to_dense(), torch.eye(4))
    assert torch.equal(target["n"], ROWS)


def test_a_partial_load_warns_once(
    store: ckptstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """What the values or modules show is in the same message as the names."""
    target = {"a": torch.zeros(4, 4, dtype=torch.int8), "b": torch.zeros(4, 4), "c": ROWS}
    with caplog.at_level(logging.WARNING, "ckptstore"):
        store.load_into("r@0", target)
    (message,) = caplog.messages
    assert "1 missing: c; 1 mismatched: a (dtype" in message
