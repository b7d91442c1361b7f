"""Replication of what is damaged: in the source, on the way, in the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from damaging import flip_object

import ckptstore
from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import content_ops
from ckptstore.repo import create_on

Backends = Callable[[], MemoryBackend]


def _store(backend: Backend) -> ckptstore.Store:
    return ckptstore.Store(create_on(backend, exist_ok=True))


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.randn(300, 100) + step}, "epoch": step}


def test_a_damaged_version_keeps_no_other_back(backends: Backends) -> None:
    """Its record comes, the others come whole, and the report names it; mended, it comes too."""
    backend = backends()
    source, target = _store(backend), _store(backends())
    run = source.run("gpt")
    for step in (1, 2, 3):
        run.save({"model": {"w": torch.randn(64, 64) + step}, "epoch": step}, step=step)
    pack = source.version("gpt@2")._content.manifest.pieces.packs[0]
    key = f"packs/{pack[:2]}/{pack}.pack"
    sound = backend.get(key, bytes_max=1 << 20)
    flip_object(backend, key)

    report = source.replicate(target)

    assert [failure.step for failure in report.failures] == [2]
    assert {v.step: v.level for v in target.versions()} == {1: "full", 2: "record", 3: "full"}
    assert target.verify().ok
    backend.delete(key)
    backend.put(key, sound)
    assert source.replicate(target).failures == ()
    assert {v.level for v in target.versions()} == {"full"}


def test_bytes_that_change_on_the_way_never_show(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that does not hold what was written there shows no version."""

    class Bad(MemoryBackend):
        def read_into(self, key: str, offset: int, buffers: Any) -> None:  # noqa: ANN401
            super().read_into(key, offset, buffers)
            if key.startswith("packs/") and len(buffers[-1]):
                buffers[-1][0] ^= 1

    source = _store(backends())
    source.run("gpt").save(_state(1), step=1)
    target = _store(Bad(f"bad/{id(monkeypatch)}"))
    report = source.replicate(target)
    assert "does not hold" in report.failures[0].message
    assert {v.level for v in target.versions()} == {"record"}
    assert source.versions()[0].state == "durable"


def test_a_version_that_is_flagged_as_damaged_does_not_travel(backends: Backends) -> None:
    """Its bytes may be sound by now: the report names it, and says what to do; the others come."""
    source, target = _store(backends()), _store(backends())
    first, second = (source.run("gpt").save(_state(step), step=step) for step in (1, 2))
    lost = {first.id: first.manifest_digest}
    source.repo.log.append(lambda now: content_ops.quarantine(now, lost))

    report = source.replicate(target)

    (failure,) = report.failures
    assert (failure.version, failure.step) == (first.id, 1)
    assert "gpt@1" in failure.message
    assert "ckptstore repair" in failure.message
    assert report.copied == (second.id,)
    assert target.resolve("gpt@1").level == "record"
    fresh = _store(backends())
    foreseen = source.replicate(fresh, dry_run=True)
    assert (foreseen.copied, foreseen.failures) == (report.copied, report.failures)
    source.repair()
    assert source.replicate(target).copied == (first.id,)
    lost[first.id] = target.resolve("gpt@1").manifest_digest
    target.repo.log.append(lambda now: content_ops.quarantine(now, lost))
    for dry_run in (True, False):
        report = source.replicate(target, dry_run=dry_run)
        assert report.exit_code == 5
        assert "the copy of gpt@1" in report.failures[0].message
    target.repair()
    assert source.replicate(target).present == (first.id, second.id)
