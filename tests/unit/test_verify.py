"""Verification, and the latest version that it finds valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from damaging import flip_pack

import ckptstore
from ckptstore import errors, limits
from ckptstore.catalog import content_ops, lifecycle_ops
from ckptstore.catalog.refs import parse_ref, resolve
from ckptstore.events import Progress, ProgressCallback
from ckptstore.maintenance.check.integrity_scan import Sample
from ckptstore.maintenance.check.verify import VerifyReport, sample_of
from ckptstore.model import Version
from ckptstore.store import Store

DAY_MS = 24 * 3600 * 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return where the store of a test is."""
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    """Return a store of small chunks with a run of two versions that share a tensor."""
    torch.manual_seed(5)
    with ckptstore.open(root, create=True, chunk_bytes=1 << 16) as opened:
        frozen = torch.randn(300, 300)
        for step in (1, 2):
            state = {"model": {"frozen": frozen, "head": torch.randn(300, 300)}, "step": step}
            opened.run("gpt").save(state, step=step)
        yield opened


def flip_chunk(root: Path, place: int = -1) -> None:
    """Flip a bit in one chunk of one pack."""
    packs = sorted(root.glob("packs/*/*.pack"), key=lambda path: path.stat().st_size)
    flip_pack(packs[place], only=1)


def test_parts_of_a_sample_are_every_chunk_exactly_once(store: Store) -> None:
    """The parts together read what a full check reads, no chunk twice, whatever their order."""
    whole = store.verify()
    parts = [store.verify(sample=0.25, part=part) for part in (3, 0, 2, 1)]

    assert whole.chunks_count > 8
    assert sum(report.chunks_count for report in parts) == whole.chunks_count
    assert sum(report.read_bytes for report in parts) == whole.read_bytes
    assert [report.sample for report in parts] == [Sample(parts=4, part=p) for p in (3, 0, 2, 1)]
    assert whole.sample is None


def test_a_check_a_day_finds_damage_within_its_days(root: Path, store: Store) -> None:
    """Exactly those parts complain that hold the damaged chunks."""
    flip_chunk(root)
    complaining = [part for part in range(8) if not store.verify(sample=1 / 8, part=part).ok]
    assert len(complaining) == 1


def test_the_part_of_the_day_moves_on_and_comes_round() -> None:
    """A fraction gives so many parts; without a part, it is the day's; 1 is no sample."""
    found = [sample_of(0.2, part=None, now_ms=day * DAY_MS + 5) for day in range(100, 106)]

    assert [s.part for s in found if s] == [0, 1, 2, 3, 4, 0]
    assert {s.parts for s in found if s} == {5}
    assert sample_of(1.0, part=3, now_ms=0) is None
    assert sample_of(0.5, part=7, now_ms=0) == Sample(parts=2, part=1)
    for wrong in (0.0, -1.0, 1.01, float("nan")):
        with pytest.raises(errors.InvalidInputError, match="a sample is a number from"):
            sample_of(wrong, part=None, now_ms=0)


@pytest.mark.parametrize("engine", [None, "threads"])
def test_the_progress_of_a_sample_is_that_of_the_sample(
    root: Path, store: Store, engine: str | None
) -> None:
    """The bar of a tenth counts about a tenth of the bytes, and ends at its end."""
    torch.manual_seed(6)
    store.run("big").save({"w": torch.randn(400, 16_384 // 4)}, step=1, codec="raw")
    logical = sum(r.logical for v in store.versions() for r in v.roles.values())
    seen: list[Progress] = []
    workers = None if engine is None else 1
    report = store.verify(
        sample=0.1, part=0, progress=seen.append, executor=engine, workers=workers
    )
    steps = [step for step in seen if step.stage == "verify"]
    assert max(step.total for step in steps) < 0.2 * logical
    assert report.read_bytes <= steps[-1].done == steps[-1].total
    assert [step.done for step in steps] == sorted(step.done for step in steps)


class Interrupt(Exception):
    """Stands for whatever stops a check."""


def stop_after(count: int) -> ProgressCallback:
    """Return a progress callback that raises once `count` bytes are done."""

    def step(progress: Progress) -> None:
        if progress.stage == "verify" and progress.done >= count:
            raise Interrupt

    return step


def test_an_interrupted_check_goes_on_where_it_stopped(
    root: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run reads only what the first did not, and reports what both found."""
    monkeypatch.setattr(limits, "VERIFY_BATCH_BYTES", 200_000)
    flip_chunk(root, 0)
    flip_chunk(root, -1)
    whole = store.verify()
    assert not whole.ok
    state = tmp_path / "verify.state"
    for stop in (1, 300_000, 600_000):
        with pytest.raises(Interrupt):
            store.verify(resume=state, progress=stop_after(stop))
        assert state.exists()
    with state.open("ab") as file:
        file.write(b'{"version":"torn')  # the machine stopped while it wrote this
    resumed = store.verify(resume=state)

    assert resumed.read_bytes < whole.read_bytes
    assert resumed.problems == whole.problems
    assert resumed.chunks_count == whole.chunks_count
    assert not state.exists()


def test_the_state_of_another_check_is_refused_and_kept(store: Store, tmp_path: Path) -> None:
    """A file of something else, another store or another sample is not touched."""
    state = tmp_path / "state"
    with pytest.raises(Interrupt):
        store.verify(resume=state, progress=stop_after(1))
    line = b'{"version":"a","manifest":"b","first":0,"end":1,"bad":{"x":"y"}}\n'
    for content in (b"my notes\n", b"no line", b"", state.read_bytes() + line):
        file = tmp_path / "other"
        file.write_bytes(content)
        if content:
            with pytest.raises(errors.InvalidInputError, match="not the state"):
                store.verify(resume=file)
            assert file.read_bytes() == content
        else:
            assert store.verify(resume=file).ok
    before = state.read_bytes()
    with pytest.raises(errors.InvalidInputError, match="another store, another sample"):
        store.verify(resume=state, sample=0.5)
    assert state.read_bytes() == before
    with (
        ckptstore.open(tmp_path / "second", create=True) as second,
        pytest.raises(errors.InvalidInputError, match="another store"),
    ):
        second.verify(resume=state)


def recorded(store: Store) -> list[bool]:
    """Return which versions are recorded as sound, oldest first."""
    return [version.verified for version in store.versions()]


def test_sound_versions_are_recorded_and_damaged_ones_are_not(root: Path, store: Store) -> None:
    """One commit says which; a second check has nothing to add; new damage is not recorded."""
    assert recorded(store) == [False, False]
    first = store.verify(record=True)
    assert first.recorded == tuple(version.id for version in store.versions())
    assert recorded(store) == [True, True]
    commits = store.repo.catalog.number
    assert store.verify(record=True).recorded == ()
    assert store.repo.catalog.number == commits

    third = store.run("gpt").save({"model": {"head": torch.randn(300, 300)}}, step=3)
    assert recorded(store) == [True, True, False]
    pending = store.verify(unverified=True, record=True)
    assert (pending.versions_count, pending.recorded) == (1, (third.id,))

    fourth = store.run("gpt").save({"model": {"head": torch.randn(300, 300)}}, step=4)
    newest = max(root.glob("packs/*/*.pack"), key=lambda path: path.stat().st_mtime_ns)
    flip_pack(newest)
    report = store.verify(record=True)
    assert report.damaged_versions == (fourth.id,)
    assert recorded(store) == [True, True, True, False]


def test_a_long_check_records_as_it_goes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found sound before an interruption is in the log already."""
    monkeypatch.setattr(limits, "VERIFY_RECORD_S", 0.0)
    with pytest.raises(Interrupt):
        store.verify(record=True, progress=stop_after(1_000_000))
    assert recorded(store) == [True, False]


def test_versions_that_are_deleted_or_only_a_record_have_nothing_to_check(
    root: Path, store: Store
) -> None:
    """Their objects may be gone, and that is no damage."""
    first, second = store.versions()
    gone = store.run("other").save({"x": torch.randn(100, 100)}, step=1)
    log = store.repo.log
    log.append(lambda now: lifecycle_ops.delete(now, [gone.id], force=True))
    move = content_ops.Move(
        version=first.id, based_on=first.manifest_digest, level="record", manifest=None,
        content=first.content,
    )  # fmt: skip
    log.append(lambda now: content_ops.relocate(now, [move]))
    for version in (first, gone):
        (root / version.manifest_key).unlink()

    report = store.verify(record=True)

    assert report.ok
    assert report.recorded == (second.id,)
    assert store.repair().ok


def kinds(report: VerifyReport) -> dict[str, set[str]]:
    """Return the notices: kind to keys."""
    found: dict[str, set[str]] = {}
    for notice in report.notices:
        found.setdefault(notice.kind, set()).add(notice.key)
    return found


def test_what_no_version_needs_is_a_notice_and_no_damage(root: Path, store: Store) -> None:
    """Orphans, condemned objects and foreign files are told apart; deleted versions keep theirs."""
    gone = store.run("other").save({"x": torch.randn(100, 100)}, step=1)
    store.repo.log.append(lambda now: lifecycle_ops.delete(now, [gone.id], force=True))
    assert store.verify().notices == ()

    pack = next(root.glob("packs/*/*.pack"))
    orphan = f"packs/ab/{'ab' * 16}.pack"
    condemned = f"manifests/cd/{'cd' * 16}.manifest"
    for key in (orphan, condemned, "packs/readme.txt", "commits/000000/notes"):
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(pack.read_bytes()[:100])
    store.repo.log.append(lambda now: content_ops.condemn(now, [condemned]))
    for level in ("full", "records"):
        report = store.verify(level=level)
        assert report.ok
        assert kinds(report) == {
            "orphan": {orphan},
            "condemned": {condemned},
            "unknown": {"packs/readme.txt", "commits/000000/notes"},
        }
    assert store.verify(["gpt"]).notices == ()


def test_a_snapshot_of_another_log_is_found_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot that is sound in itself, but not of this log, is damage; repair folds it anew."""
    monkeypatch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 2)
    for name in ("one", "two"):
        with ckptstore.open(tmp_path / name, create=True) as each:
            for step in (1, 2):
                each.run("gpt").save({"x": torch.tensor(step)}, step=step)
    (snapshot,) = (tmp_path / "one" / "snapshots").iterdir()
    (foreign,) = (tmp_path / "two" / "snapshots").iterdir()
    snapshot.write_bytes(foreign.read_bytes())

    with ckptstore.open(tmp_path / "one") as store:
        assert [p.kind for p in store.verify().problems] == [errors.CorruptObjectError.kind]
        assert store.repair(dry_run=True).snapshots == (f"snapshots/{snapshot.name}",)
        assert store.repair().ok
        assert store.verify().ok


def test_a_manifest_in_memory_vouches_for_nothing(root: Path, store: Store) -> None:
    """A manifest that was lost or damaged is found by the very process that still remembers it."""
    lost, damaged = (root / store.resolve(f"gpt@{step}").manifest_key for step in (1, 2))
    for step in (1, 2):
        store.load(f"gpt@{step}")
    lost.unlink()
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)

    for report in (store.verify(level="records"), store.verify(record=True)):
        assert len(report.problems) == 2
        assert len(report.damaged_versions) == 2
        assert not report.recorded


@pytest.fixture
def latest_store(root: Path) -> Iterator[Store]:
    """Return a store with a run of four versions."""
    torch.manual_seed(2)
    with ckptstore.open(root, create=True) as opened:
        for step in (1, 2, 3, 4):
            opened.run("gpt").save({"model": {"w": torch.randn(200, 200)}, "step": step}, step=step)
        yield opened


def damage_data(root: Path, version: Version) -> None:
    """Flip a bit in the pack that a version alone wrote."""
    packs = sorted(root.glob("packs/*/*.pack"), key=lambda path: path.stat().st_mtime_ns)
    flip_pack(packs[version.step - 1])


def cut_manifest(root: Path, version: Version) -> None:
    """Cut the end of a version's manifest."""
    path = root / version.manifest_key
    path.write_bytes(path.read_bytes()[:-1])


def test_without_damage_it_is_the_latest(
    latest_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The head, and not a word, by every way to ask."""
    run = latest_store.run("gpt")
    assert run.load("latest-valid")["step"] == 4
    assert latest_store.load("gpt@latest-valid")["step"] == 4
    assert latest_store.resolve("gpt@latest-valid") == run.resolve("latest-valid") == run.head
    assert run.latest_valid().skipped == ()
    assert caplog.text == ""


def test_what_is_damaged_is_skipped_loudly(
    root: Path, latest_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged data and a damaged manifest are skipped, each with a warning that names it."""
    run = latest_store.run("gpt")
    cut_manifest(root, run.resolve(4))
    damage_data(root, run.resolve(3))

    with ckptstore.open(root) as fresh:
        run = fresh.run("gpt")
        assert run.load("latest-valid")["step"] == 2
        warned = [record.getMessage() for record in caplog.records]
        assert [("gpt@4" in warned[0], "gpt@3" in warned[1])] == [(True, True)]
        found = run.latest_valid()
        assert found.version.step == 2
        assert [skipped.version.step for skipped in found.skipped] == [4, 3]
        assert "model.w" in found.skipped[1].why
        assert fresh.version("gpt@latest-valid").step == 2
        # The part that is asked for decides what a load skips.
        assert run.load("latest-valid", include=["model.*"])["model"]["w"].shape == (200, 200)
        target = {"model": {"w": torch.zeros(200, 200)}, "step": 0}
        assert run.load("latest-valid", into=target)["step"] == 2
        assert torch.equal(target["model"]["w"], run.load(2)["model"]["w"])  # type: ignore[index]


def test_if_none_is_sound_the_error_lists_all(root: Path, latest_store: Store) -> None:
    """No version is better than a wrong one; every reason is told."""
    for version in latest_store.versions():
        cut_manifest(root, version)
    with ckptstore.open(root) as fresh:
        for ask in (
            lambda: fresh.run("gpt").load("latest-valid"),
            lambda: fresh.resolve("gpt@latest-valid"),
        ):
            with pytest.raises(errors.CorruptObjectError, match=r"@4 .*@3 .*@2 .*@1 ") as caught:
                ask()
            assert "repair" in caught.value.hint


def test_only_the_line_of_the_run_counts(latest_store: Store) -> None:
    """After a rollback it is the target, not what was abandoned; no run is an error of its own."""
    latest_store.run("gpt").rollback(2)
    assert latest_store.resolve("gpt@latest-valid").step == 2
    with pytest.raises(errors.RunNotFoundError):
        latest_store.resolve("nobody@latest-valid")
    latest_store.remove(["gpt@1", "gpt@2", "gpt@3", "gpt@4"], force=True)
    with pytest.raises(errors.VersionNotFoundError, match="could be loaded"):
        latest_store.resolve("gpt@latest-valid")


def test_the_catalog_alone_does_not_know(latest_store: Store) -> None:
    """The grammar takes it, the pure resolver says who can tell, and no tag can have the name."""
    ref = parse_ref("gpt@latest-valid")
    assert (ref.kind, ref.run) == ("valid", "gpt")
    with pytest.raises(errors.InvalidRefError, match="catalog alone"):
        resolve(latest_store.repo.catalog, ref)
    with pytest.raises(ckptstore.CkptStoreError, match="meaning of its own"):
        latest_store.tag("gpt", "latest-valid")
