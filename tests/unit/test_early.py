"""What leaves its storage class early: foreseen from listings, exactly; elsewhere no request."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from coldbackend import ColdBackend, Shelf
from metered import MeteredBackend

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.memory import MemoryBackend, open_memory
from ckptstore.config import Options, SystemEnvironment
from ckptstore.format.keys import pack_key
from ckptstore.jobs import read_job, run_job
from ckptstore.maintenance.retention.early_deletion import Early, Leaving, leaving_early
from ckptstore.repo import Finding, create_on
from ckptstore.store import Store

_DAY_S = 86_400.0


class Clock(SystemEnvironment):
    """A clock that can be moved."""

    ahead_s = 0.0

    def now_ms(self) -> int:
        """Return the wall clock, moved."""
        return super().now_ms() + int(self.ahead_s * 1000)


@pytest.fixture
def shelf() -> Shelf:
    """Return what the storage knows of objects beside their bytes."""
    return Shelf()


@pytest.fixture
def clock() -> Clock:
    """Return a clock."""
    return Clock()


@pytest.fixture
def store(shelf: Shelf, clock: Clock) -> Iterator[Store]:
    """Return a store of three versions, on storage with classes; two of them share a tensor."""
    backend = ColdBackend(MemoryBackend(f"early-{uuid.uuid4().hex}"), shelf)
    finding = Finding(put_if_absent=PutIfAbsent.ATOMIC, report={})
    repo = create_on(
        backend,
        environment=clock,
        options=Options(codec="raw"),
        prober=lambda _backend, _environment: finding,
    )
    with Store(repo) as opened:
        run = opened.run("gpt")
        shared = torch.randn(60_000)
        for step in (1, 2, 3):
            state = {
                "model": {"w": torch.randn(50_000), **({"shared": shared} if step > 1 else {})},
                "optimizer": {"m": torch.randn(50_000)},
            }
            run.save(state, step=step)
        yield opened


def _packs(store: Store, ref: str) -> set[str]:
    pieces = store.repo.manifests.load(store.resolve(ref)).pieces
    return {pieces.packs[int(place)] for place in set(pieces.pack.tolist())}


def test_what_goes_early_is_told_with_the_days_that_are_left(
    store: Store, shelf: Shelf, clock: Clock
) -> None:
    """Class, packs, bytes, versions and days; nothing once the days have passed."""
    store.archive(["gpt@1"], storage_class="GLACIER")
    clock.ahead_s = 29.5 * _DAY_S
    (found,) = store.leaving_early(["gpt@1", "gpt@2"]).classes
    mine = _packs(store, "gpt@1")
    assert (found.storage_class, found.min_days, found.days_left) == ("GLACIER", 90, 61)
    assert (found.versions_count, found.packs_count) == (1, len(mine))
    sizes = {info.key: info.size_bytes for info in store.repo.backend.list("packs/")}
    assert found.size_bytes == sum(sizes[pack_key(pack)] for pack in mine)
    clock.ahead_s = 90.5 * _DAY_S
    assert store.leaving_early(["gpt@1"]) == Early()


def test_packs_that_others_need_are_not_counted(store: Store, shelf: Shelf) -> None:
    """What stays for another version leaves nothing; once that goes too, it counts for both."""
    for pack in _packs(store, "gpt@2") | _packs(store, "gpt@3"):
        shelf.classes[pack_key(pack)] = "DEEP_ARCHIVE"
    shared = _packs(store, "gpt@2") & _packs(store, "gpt@3")
    assert shared
    assert _packs(store, "gpt@2") == shared
    assert store.leaving_early(["gpt@2"]) == Early()
    (alone,) = store.leaving_early(["gpt@3"]).classes
    assert alone.packs_count == len(_packs(store, "gpt@3") - shared) == 1
    (both,) = store.leaving_early(["gpt@2", "gpt@3"]).classes
    assert both.packs_count == len(_packs(store, "gpt@2") | _packs(store, "gpt@3"))
    assert (both.versions_count, both.days_left) == (2, 180)


def test_what_stays_of_a_version_is_not_counted(store: Store, shelf: Shelf) -> None:
    """Of one that is reduced to its weights only the rest goes, as ageing then finds."""
    run = store.run("parts")
    model = {"w": torch.randn(50_000)}
    run.save({"model": model}, step=1)
    run.save({"model": model, "optimizer": {"m": torch.randn(50_000)}}, step=2)
    store.remove(["parts@1"])
    for pack in _packs(store, "parts@2"):
        shelf.classes[pack_key(pack)] = "NEARLINE"
    before = _packs(store, "parts@2")
    (found,) = store.leaving_early(["parts@2"], keep="weights").classes
    (whole,) = store.leaving_early(["parts@2"]).classes
    store.age(["parts@2"], "weights", force=True)
    assert found.packs_count == len(before - _packs(store, "parts@2")) == 1
    assert whole.packs_count == len(before) == 2


def test_retention_and_its_preview(store: Store, shelf: Shelf) -> None:
    """A dry run tells; a quick one asks the storage nothing, nor does one that is carried out."""
    store.archive(["gpt@1"], storage_class="GLACIER")
    foreseen = store.retain({"full": "last 2"}, dry_run=True)
    (found,) = foreseen.early.classes
    assert (found.storage_class, found.versions_count, found.days_left) == ("GLACIER", 1, 90)
    assert store.retain({"full": "last 2"}, dry_run=True, quick=True).early == Early()
    assert store.retain({"full": "last 3"}, dry_run=True).early == Early()
    assert store.retain({"full": "last 2"}).early == Early()


def test_it_is_cheap(store: Store, shelf: Shelf) -> None:
    """One listing; manifests only if something leaves early; no look at any pack by itself."""
    gone = [store.resolve(ref) for ref in ("gpt@1", "gpt@2")]
    leaving = [Leaving(version=version, fate="gone") for version in gone]
    store.repo.backend = meter = MeteredBackend(store.repo.backend)
    assert leaving_early(store.repo, store.repo.catalog, leaving) == Early()
    assert {name: one.calls for name, one in meter.snapshot().items()} == {"list": 1}
    store.archive(["gpt@1"], storage_class="GLACIER")
    looked = list(shelf.looked)
    assert store.leaving_early(["gpt@1"]).classes
    assert shelf.looked == looked


def test_what_was_not_looked_at_is_said(
    store: Store, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a listing nor manifests are read without end, and nothing is passed over silently."""
    store.archive(["gpt@1", "gpt@2"], storage_class="GLACIER")
    monkeypatch.setattr(limits, "EARLY_MANIFESTS_MAX", 1)
    early = store.leaving_early(["gpt@1", "gpt@2"])
    assert any("only 1 of 2 versions" in text for text in early.unknown)
    monkeypatch.setattr(limits, "EARLY_MANIFESTS_MAX", 2)
    early = store.leaving_early(["gpt@1", "gpt@2"])
    assert any("further versions" in text for text in early.unknown)
    monkeypatch.setattr(limits, "EARLY_PACKS_LISTED_MAX", 1)
    assert any("first 1 packs" in text for text in store.leaving_early(["gpt@1"]).unknown)


def test_a_manifest_that_cannot_be_read_is_said(store: Store, shelf: Shelf) -> None:
    """What a damaged version would let go is not known, and no error."""
    store.archive(["gpt@1"], storage_class="GLACIER")
    store.repo.backend.delete(store.resolve("gpt@1").manifest_key)
    early = store.leaving_early(["gpt@1"])
    assert not early.classes
    assert any("cannot be read" in text for text in early.unknown)


def test_file_systems_have_no_classes(tmp_path: Path) -> None:
    """Nothing is listed or read there."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        for step in (1, 2):
            store.run("gpt").save({"w": torch.full((9,), float(step))}, step=step)
        meter = MeteredBackend(store.repo.backend)
        store.repo.backend = meter
        leaving = [Leaving(version=store.resolve("gpt@1"), fate="gone")]
        assert leaving_early(store.repo, store.repo.catalog, leaving) == Early()
        assert not any(meter.calls for meter in meter.snapshot().values())


def test_a_job_reports_it(tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's retention says what of it is charged for longer; its collection too."""

    def open_cold(url: str, **_options: object) -> ColdBackend:
        return ColdBackend(open_memory(url.replace("cold://", "memory://")), shelf)

    from ckptstore.backends import registry

    monkeypatch.setattr("coldbackend.open_cold", open_cold, raising=False)
    monkeypatch.setitem(registry.FACTORIES, "cold", "coldbackend:open_cold")
    target = f"cold://{uuid.uuid4().hex}"
    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        for step in (1, 2, 3):
            hot.run("gpt").save({"w": torch.full((40_000,), float(step))}, step=step)
        hot.replicate(target)
    with ckptstore.open(target) as cold:
        cold.archive(["gpt@1"], storage_class="GLACIER")
    file = tmp_path / "job.toml"
    file.write_text(
        f'[source]\nurl = "{tmp_path}/hot"\n[target]\nurl = "{target}"\n'
        '[retain]\ntarget = { full = "last 2" }\n[gc]\ntarget = true\ngrace = "1s"\n'
    )
    for dry_run in (True, False):
        report = run_job(read_job(file), dry_run=dry_run)
        steps = {step.name: step for step in report.steps}
        (found,) = steps["retain-target"].result["early"]["classes"]
        assert (found["storage_class"], found["versions_count"]) == ("GLACIER", 1)
    (text,) = steps["gc-target"].result["early"]
    assert "leave GLACIER before 90 days" in text
