"""The machine of ``store_machine``: clients that do everything to one store, with deltas too."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from typing import Any

import pytest
import simclients
import store_machine as machine
import torch
from shortening import is_short
from store_machine import LONG, run

from ckptstore import limits
from ckptstore.codecs import codec_table
from ckptstore.config import Options
from ckptstore.maintenance.collect import gc, inline_deltas
from ckptstore.objects import deltas


def test_clients_beside_collections() -> None:
    """Each of thousands of steps ends as the model says; a third of them in the short tier."""
    histories = 20 if is_short() else 60
    figures = run(histories, 110, same=True)

    print(sorted(figures.items()))  # noqa: T201 - shown where the test fails
    assert figures["steps"] > 33 * histories


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_clients_beside_collections_for_long() -> None:
    """At least 100,000 steps, in rounds of new histories until there are so many.

    No kind of step always fails. ``CKPTSTORE_MACHINE_STEPS`` asks for another number. What was
    done is printed as it goes, so that a run that is ended early says how far it came.
    """
    wanted = int(os.environ.get("CKPTSTORE_MACHINE_STEPS", str(LONG)))
    figures: Counter[str] = Counter()
    while figures["steps"] < wanted:
        figures += run(100, 100)
        print(f"{figures['steps']} of {wanted} steps", file=sys.__stderr__, flush=True)

    print(sorted(figures.items()))  # noqa: T201 - the figures of a campaign
    assert figures["steps"] >= wanted
    kinds = ("save", "fork", "rollback", "name", "pin", "unpin", "remove", "undelete", "age")
    for name in (*kinds, "retain", "gc", "gc with grace"):
        assert figures[f"{name}: done"] > 0, name
    assert figures["retain: as foretold"] > 0
    assert figures["records forged"] > 0
    for level in ("weights", "weights-bf16", "weights-int8", "record", "gone"):
        assert figures[f"became {level}"] > 0, level


Values = tuple[int, int, int]
ELEMENTS = 512


def noise(seed: int, scale: float = 0.02) -> torch.Tensor:
    """Return some numbers, the same for the same seed."""
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * scale


def state_of(values: Values) -> dict[str, Any]:
    """Return a state of three tensors: the weights are near to those of any other values."""
    weight, half, moment = values
    return {
        "model": {
            "w": noise(1) + weight * noise(2, 1e-6),
            "h": (noise(3) + half * noise(4, 1e-3)).to(torch.bfloat16),
        },
        "optimizer": {"m": noise(5 + moment).to(torch.float64)},
    }


def check_state(
    found: Any,  # noqa: ANN401
    values: Values,
    *,
    may_lack: bool,
    may_round: bool = False,
) -> None:
    """Hold that a state is bit by bit that of `values`; or where it may be its weights, or near."""
    meant = state_of(values)
    for part in ("model",) if may_lack and "optimizer" not in found else meant:
        assert found[part].keys() == meant[part].keys()
        for name, tensor in meant[part].items():
            given = found[part][name]
            assert given.dtype == tensor.dtype
            if part == "model" and may_round:
                assert torch.allclose(given, tensor, rtol=0.02, atol=0.001)
            else:
                assert torch.equal(given, tensor)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let clients save deltas of small tensors; count these, and pieces that were rebased."""
    found: Counter[str] = Counter()
    encode, whole = codec_table.encode_delta, inline_deltas.rebase

    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found["deltas"] += 1
        return encode(*args, **kwargs)

    def rebased(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        done = whole(*args, **kwargs)
        found["rebased"] += done.pieces_count
        return done

    monkeypatch.setattr(deltas, "encode_delta", counted)
    monkeypatch.setattr(gc, "rebase", rebased)
    monkeypatch.setattr(machine, "state_of", state_of)
    monkeypatch.setattr(machine, "check_state", check_state)
    monkeypatch.setattr(simclients, "Options", functools.partial(Options, codec="delta"))
    monkeypatch.setattr(limits, "SMALL_TENSOR_BYTES", 1024)
    return found


@pytest.mark.slow
def test_deltas_beside_collections(counts: Counter[str]) -> None:
    """Saves with deltas, retention, collections, repacks, forks and loads, call by call.

    Each step ends as the model says. How often each kind of step comes is chance: the soak's.
    """
    figures = machine.run(20, 100, same=True)
    print(sorted(figures.items()), counts)  # noqa: T201 - shown where the test fails
    assert figures["steps"] > 33 * 20


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_deltas_beside_collections_for_long(counts: Counter[str]) -> None:
    """The same for long, on new histories; ``CKPTSTORE_MACHINE_STEPS`` asks for so many steps."""
    wanted = int(os.environ.get("CKPTSTORE_MACHINE_STEPS", str(machine.LONG)))
    figures: Counter[str] = Counter()
    while figures["steps"] < wanted:
        figures += machine.run(100, 100)
    print(sorted(figures.items()), counts)  # noqa: T201 - the figures of a campaign
    assert counts["deltas"] > figures["steps"] // 100
    assert counts["rebased"] > 0
    for name in ("save", "fork", "remove", "age", "retain", "gc"):
        assert figures[f"{name}: done"] > 0, name
