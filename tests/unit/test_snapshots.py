"""Catalog snapshots: opening stays cheap, and no snapshot can change a result."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import pytest
from simulated_environment import SimulatedEnvironment

from ckptstore import limits
from ckptstore.backends.base import Buffer, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog import run_ops, snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import CommitBody, encode_commit, extended
from ckptstore.catalog.log import Build, Log
from ckptstore.catalog.run_ops import CreateRun, Save
from ckptstore.errors import CorruptObjectError, UnsupportedFeatureError
from ckptstore.format.framing import encode_frame
from ckptstore.format.keys import COMMITS_PREFIX, SNAPSHOTS_PREFIX, commit_key, snapshot_key
from ckptstore.format.snapshot import MAGIC, SnapshotBody, decode_snapshot, encode_snapshot
from ckptstore.testing.faulty import Fault, FaultyBackend

Saving = Callable[..., Build]


class Counting(WrapperBackend):
    """Counts calls by their first folder, and the bytes read."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    def get(self, key: str, *, bytes_max: int) -> bytes:
        self.calls["get " + key.partition("/")[0]] += 1
        return self.inner.get(key, bytes_max=bytes_max)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.calls["list " + prefix.rstrip("/")] += 1
        return self.inner.list(prefix, after=after)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make snapshots due at every 10th commit."""
    monkeypatch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 10)


def snapshot_keys(backend: MemoryBackend) -> list[str]:
    """Return the keys of all snapshots."""
    return [info.key for info in backend.list(SNAPSHOTS_PREFIX)]


def fill(memory: MemoryBackend, saving: Saving, count: int) -> Log:
    """Commit `count` saves, with tags and annotations in between."""
    log = Log(memory)
    for step in range(count):
        log.append(saving(f"run{step % 2}", step=step, metrics={"x": step}, tags=["newest"]))
    return log


def from_the_log(memory: MemoryBackend) -> SnapshotBody:
    """Return what folding all commits gives, snapshots unseen."""
    catalog, error = extended(Catalog(), list(Log(memory).commits()))
    assert error is None
    return catalog.to_snapshot()


def opened(memory: MemoryBackend) -> tuple[SnapshotBody, Counter[str]]:
    """Open the log anew and return its catalog and the calls that this took."""
    backend = Counting(memory)
    return Log(backend, SimulatedEnvironment()).refresh().to_snapshot(), backend.calls


@pytest.mark.parametrize(
    ("number", "commits"),
    [(1, 100), (99_999, 100), (100_000, 200), (1_000_000, 1600), (10**9, 1_638_400)],
)
def test_the_period_doubles_with_the_log(number: int, commits: int) -> None:
    """Every 100 commits, and never more often than every 1,000th part of a long log."""
    assert snapshots.period(number) == commits


def test_exactly_one_writer_is_due() -> None:
    """The number decides, whoever commits it; three missed periods make anyone due."""
    assert [n for n in range(1, 301) if snapshots.due(n, last=n - 1)] == [100, 200, 300]
    assert not snapshots.due(399, last=100)
    assert snapshots.due(401, last=100)


@pytest.mark.usefixtures("often")
def test_opening_reads_one_snapshot_and_the_tail(memory: MemoryBackend, saving: Saving) -> None:
    """Two listings, one snapshot, the commit that confirms it, and what came after."""
    fill(memory, saving, 57)
    body, calls = opened(memory)
    assert calls == {"list snapshots": 1, "get snapshots": 1, "list commits": 1, "get commits": 8}
    assert body == from_the_log(memory)


@pytest.mark.usefixtures("often")
def test_old_snapshots_are_dropped(memory: MemoryBackend, saving: Saving) -> None:
    """The newest and one spare are kept."""
    fill(memory, saving, 57)
    assert snapshot_keys(memory) == [snapshot_key(40), snapshot_key(50)]


@pytest.mark.usefixtures("often")
def test_a_refresh_after_a_snapshot_goes_on_as_usual(memory: MemoryBackend, saving: Saving) -> None:
    """A log opened from a snapshot commits and refreshes like any other."""
    fill(memory, saving, 25)
    log = Log(memory)
    log.append(saving("run0", step=99))
    log.append(lambda c: run_ops.annotate(c, f"{3:032x}", {"late": 1.0}))
    assert Log(memory).refresh().to_snapshot() == from_the_log(memory)
    assert log.catalog.to_snapshot() == from_the_log(memory)
    assert log.catalog.version(f"{3:032x}").metrics == {"x": 2.0, "late": 1.0}


def replace_object(memory: MemoryBackend, key: str, data: bytes) -> None:
    """Change a stored object."""
    memory.delete(key)
    memory.put(key, data)


@pytest.mark.usefixtures("often")
def test_any_flipped_bit_in_a_snapshot_changes_nothing(
    memory: MemoryBackend, saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged snapshot is skipped with a warning; the older one serves."""
    fill(memory, saving, 25)
    expected = from_the_log(memory)
    whole = memory.get(snapshot_key(20), bytes_max=10**6)
    for bit in range(0, 8 * len(whole), 97):
        torn = bytearray(whole)
        torn[bit // 8] ^= 1 << bit % 8
        replace_object(memory, snapshot_key(20), bytes(torn))
        caplog.clear()
        body, calls = opened(memory)
        assert body == expected
        assert calls["get snapshots"] == 2
        assert calls["get commits"] == 16
        assert snapshot_key(20) in caplog.text


@pytest.mark.usefixtures("often")
def test_without_any_sound_snapshot_the_log_is_read(
    memory: MemoryBackend, saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """All snapshots cut off: everything is folded from the first commit."""
    fill(memory, saving, 25)
    for key in snapshot_keys(memory):
        replace_object(memory, key, b"junk")
    body, calls = opened(memory)
    assert body == from_the_log(memory)
    assert calls["get commits"] == 25
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 2


@pytest.mark.usefixtures("often")
def test_a_snapshot_of_another_log_is_not_believed(
    memory: MemoryBackend, saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """Sound in itself, but the log's commit of that number has another digest."""
    fill(memory, saving, 25)
    other = MemoryBackend(memory.url + "/other")
    foreign = fill(other, saving, 20).catalog
    replace_object(memory, snapshot_key(20), encode_snapshot(foreign.to_snapshot()))
    assert opened(memory)[0] == from_the_log(memory)
    assert "another digest" in caplog.text


@pytest.mark.usefixtures("often")
def test_a_snapshot_beyond_the_log_is_not_believed(
    memory: MemoryBackend, saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """Number 90 of a log of 25 would make the next commit leave a gap."""
    log = fill(memory, saving, 25)
    beyond = msgspec.structs.replace(log.catalog.to_snapshot(), number=90)
    memory.put(snapshot_key(90), encode_snapshot(beyond))
    again = Log(memory)
    assert again.append(saving("run0", step=1)).number == 26
    assert "is missing" in caplog.text


@pytest.mark.usefixtures("often")
def test_a_snapshot_under_another_number_is_not_believed(
    memory: MemoryBackend, saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of snapshot 10 named 20 says so itself."""
    fill(memory, saving, 25)
    ten = memory.get(snapshot_key(10), bytes_max=10**6)
    replace_object(memory, snapshot_key(20), ten)
    assert opened(memory)[0] == from_the_log(memory)
    assert "holds the catalog after commit 10" in caplog.text


@pytest.mark.usefixtures("often")
def test_damage_behind_the_snapshot_is_found_by_reading_the_log(
    memory: MemoryBackend, saving: Saving
) -> None:
    """Opening does not read commits before the snapshot; reading the history does."""
    fill(memory, saving, 25)
    memory.delete(commit_key(5))
    assert opened(memory)[0].number == 25
    with pytest.raises(CorruptObjectError, match=commit_key(5)):
        list(Log(memory, SimulatedEnvironment()).commits())


@pytest.mark.usefixtures("often")
def test_a_lost_log_is_not_replaced_by_its_snapshot(
    memory: MemoryBackend, saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """With the confirming commit gone there is a gap, not a silent acceptance."""
    fill(memory, saving, 25)
    memory.delete(commit_key(20))
    with pytest.raises(CorruptObjectError, match=commit_key(20)):
        Log(memory, SimulatedEnvironment()).refresh()
    assert caplog.records


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("call", ["put_if_absent", "list", "delete"])
def test_failing_to_write_or_drop_a_snapshot_is_only_logged(
    memory: MemoryBackend, saving: Saving, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """The commit is made; its snapshot is a cache."""
    fault = Fault(calls=frozenset({call}), at=0, times=0)

    class Selective(FaultyBackend):
        """Fails only for snapshots."""

        def put_if_absent(self, key: str, data: Buffer) -> None:
            if key.startswith(SNAPSHOTS_PREFIX):
                super().put_if_absent(key, data)
            else:
                self.inner.put_if_absent(key, data)

        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            if prefix == SNAPSHOTS_PREFIX:
                return super().list(prefix, after=after)
            return self.inner.list(prefix, after=after)

    log = Log(Selective(memory, fault))
    log.refresh()
    fault.at = 1
    for step in range(30):
        log.append(saving(step=step))
    assert fault.hits >= 1
    assert len(list(memory.list(COMMITS_PREFIX))) == 30
    assert "catalog snapshot" in caplog.text
    assert opened(memory)[0].number == 30


@pytest.mark.usefixtures("often")
def test_a_missed_snapshot_is_made_up_for(memory: MemoryBackend, saving: Saving) -> None:
    """The writers of 10, 20 and 30 died before their snapshots: the next ones write it."""
    log = fill(memory, saving, 31)
    for key in snapshot_keys(memory):
        memory.delete(key)
    late = Log(memory)
    late.append(saving("run0", step=1))
    assert snapshot_keys(memory) == [snapshot_key(32)]
    log.append(saving("run0", step=2))
    assert snapshot_keys(memory) == [snapshot_key(32)]


@pytest.mark.usefixtures("often")
def test_a_writer_that_saves_rarely_writes_no_superfluous_snapshot(
    memory: MemoryBackend, saving: Saving
) -> None:
    """Others wrote snapshots while it computed: it looks before it takes one for missed."""
    rare = Log(memory)
    rare.append(saving(step=0))
    fill(memory, saving, 44)
    rare.append(saving(step=1))
    assert snapshot_keys(memory) == [snapshot_key(30), snapshot_key(40)]


@pytest.mark.usefixtures("often")
def test_a_single_writer_writes_snapshots_without_the_condition(
    memory: MemoryBackend, saving: Saving
) -> None:
    """No put-if-absent is tried where there is none."""
    fault = Fault(calls=frozenset({"put_if_absent"}), times=0)
    log = Log(FaultyBackend(memory, fault), single_writer=True)
    for step in range(12):
        log.append(saving(step=step))
    assert fault.seen == 0
    assert snapshot_keys(memory) == [snapshot_key(10)]


# --- the record ---------------------------------------------------------------------------------
def test_a_snapshot_survives(memory: MemoryBackend, saving: Saving) -> None:
    """Encoded and decoded, a catalog answers the same."""
    catalog = fill(memory, saving, 7).catalog
    body = decode_snapshot(encode_snapshot(catalog.to_snapshot()), where="k")
    again = Catalog.from_snapshot(body, where="k")
    assert list(again.versions()) == list(catalog.versions())
    assert again.runs() == catalog.runs()
    assert (again.number, again.digest) == (catalog.number, catalog.digest)


def test_rows_share_what_they_have_in_common(memory: MemoryBackend, saving: Saving) -> None:
    """A parent's id and a run's name are one string each: memory of large catalogs."""
    body = decode_snapshot(
        encode_snapshot(fill(memory, saving, 7).catalog.to_snapshot()), where="k"
    )
    Catalog.from_snapshot(body, where="k")
    rows = {row.id: row for row in body.versions}
    children = [row for row in body.versions if row.parent]
    assert children
    assert all(row.parent is rows[row.parent].id for row in children)
    assert all(row.run is rows[row.parent].run for row in children)


HOSTILE: dict[str, Callable[[SnapshotBody], SnapshotBody]] = {
    "no runs": lambda b: msgspec.structs.replace(b, runs=[]),
    "runs twice": lambda b: msgspec.structs.replace(b, runs=b.runs * 2),
    "versions twice": lambda b: msgspec.structs.replace(b, versions=b.versions * 2),
    "children first": lambda b: msgspec.structs.replace(b, versions=b.versions[::-1]),
    "heads missing": lambda b: msgspec.structs.replace(b, versions=b.versions[:1]),
    "id too short": lambda b: _newest(b, id="ab"),
    "id of other characters": lambda b: _newest(b, id="AB" * 16),
    "id with a line end": lambda b: _newest(b, id="ab" * 15 + "a\n"),
    "bad run name": lambda b: _run(b, name="a@b"),
    "bad tag": lambda b: _run(b, tags={"latest": b.versions[0].id}),
    "tag of nothing": lambda b: _run(b, tags={"t": "f" * 32}),
    "head of nothing": lambda b: _run(b, head="f" * 32),
    "head of another run": lambda b: _run(b, head=b.versions[1].id),
}


def _newest(body: SnapshotBody, **changed: object) -> SnapshotBody:
    last = msgspec.structs.replace(body.versions[-1], **changed)
    return msgspec.structs.replace(body, versions=[*body.versions[:-1], last])


def _run(body: SnapshotBody, **changed: object) -> SnapshotBody:
    runs = [msgspec.structs.replace(body.runs[0], **changed), *body.runs[1:]]
    return msgspec.structs.replace(body, runs=runs)


@pytest.mark.parametrize("change", HOSTILE)
def test_a_snapshot_that_contradicts_itself_is_refused(
    memory: MemoryBackend, saving: Saving, change: str
) -> None:
    """Rows that name what is not there, or break the name rules, are corruption."""
    body = HOSTILE[change](fill(memory, saving, 5).catalog.to_snapshot())
    data = encode_snapshot(body)
    with pytest.raises(CorruptObjectError, match="snapshots/x"):
        Catalog.from_snapshot(decode_snapshot(data, where="snapshots/x"), where="snapshots/x")


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x91\x01", msgspec.msgpack.encode([1, "x", [], []]), b"\x91" * 10**6],
)
def test_other_records_are_refused(payload: bytes) -> None:
    """A frame around something else is corruption, however deep it is nested."""
    with pytest.raises(CorruptObjectError):
        decode_snapshot(encode_frame(MAGIC, payload), where="k")


def test_a_newer_snapshot_is_refused_by_kind() -> None:
    """Format 2 is for a newer version to read."""
    data = encode_frame(MAGIC, b"")
    with pytest.raises(UnsupportedFeatureError):
        decode_snapshot(data[:8] + b"\2" + data[9:], where="k")


def test_opaque_fields_are_checked_when_looked_at(memory: MemoryBackend, saving: Saving) -> None:
    """A row whose details are junk is corruption that names the version."""
    body = fill(memory, saving, 1).catalog.to_snapshot()
    row = body.versions[0]
    for field, junk in (("details", b"\xc1"), ("metrics", b"\x91\x01"), ("metrics", b"\xa1\xff")):
        rows = [msgspec.structs.replace(row, **{field: junk})]
        catalog = Catalog.from_snapshot(msgspec.structs.replace(body, versions=rows), where="k")
        with pytest.raises(CorruptObjectError, match=row.id):
            list(catalog.versions())


# --- scale --------------------------------------------------------------------------------------
def test_a_large_store_opens_with_few_reads(
    memory: MemoryBackend, saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3,000 versions: a hundred commits at most are read after the snapshot, one by one none."""
    monkeypatch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 10**6)
    template = Log(memory)
    template.append(saving(step=0, metrics={"loss": 1.0}))
    save = next(Log(memory).commits()).ops[1]
    assert isinstance(save, Save)
    store = MemoryBackend(memory.url + "/large")
    catalog = Catalog()
    for start in range(0, 3000, 600):
        commits = []
        number, digest = catalog.number, catalog.digest
        for offset in range(600):
            step = start + offset
            fresh = msgspec.structs.replace(save, version=f"{step + 1:032x}", step=step)
            ops = (fresh,) if step else (CreateRun(run="gpt"), fresh)
            body = CommitBody(
                magic="ckptstore-commit", format=1, number=number + 1, previous=digest,
                write_id="c" * 32, at_ms=step, by="", ops=ops,
            )  # fmt: skip
            data, commit = encode_commit(body)
            store.put(commit.key, data)
            commits.append(commit)
            number, digest = commit.number, commit.digest
        catalog, error = extended(catalog, commits)
        assert error is None
    assert snapshots.write(store, catalog)
    monkeypatch.undo()
    log = Log(store)
    for step in range(3000, 3099):
        log.append(saving(step=step, version=f"{step + 1:032x}"))
    backend = Counting(store)
    opened_catalog = Log(backend).refresh()
    assert opened_catalog.versions_count == 3099
    assert backend.calls == {
        "list snapshots": 1, "get snapshots": 1, "list commits": 1, "get commits": 100,
    }  # fmt: skip
