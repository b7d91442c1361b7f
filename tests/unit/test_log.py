"""The log: one winner per number, nothing lost, nothing claimed that is not so."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from simulated_environment import SimulatedEnvironment

from ckptstore import errors, limits
from ckptstore.backends.base import Buffer, Capabilities, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog import run_ops, snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import encode_commit
from ckptstore.catalog.log import Build, Log
from ckptstore.catalog.run_ops import CreateRun
from ckptstore.catalog.state import Op
from ckptstore.format.framing import decode_envelope, encode_envelope
from ckptstore.format.keys import COMMITS_PREFIX, commit_key, snapshot_key
from ckptstore.testing.faulty import Fault, FaultyBackend, When

Saving = Callable[..., Build]


def commits_of(backend: MemoryBackend) -> list[str]:
    """Return the keys of all commits, past the log under test."""
    return [info.key for info in backend.list(COMMITS_PREFIX)]


def replace_object(backend: MemoryBackend, key: str, data: bytes) -> None:
    """Change a stored object, as damage or an attacker would."""
    backend.delete(key)
    backend.put(key, data)


def ids(catalog: Catalog) -> list[str]:
    """Return the ids of all versions in order."""
    return [version.id for version in catalog.versions()]


class Hook(WrapperBackend):
    """Calls a function in place of put-if-absent, put or get; the inner backend is at hand."""

    on_create: Callable[[str, bytes], None] | None = None
    on_put: Callable[[str, bytes], None] | None = None
    on_list: Callable[[str, str], Iterator[ObjectInfo]] | None = None
    lag_s: float = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """Declare the lag that the test asks for."""
        return replace(self.inner.capabilities, lookup_lag_s=self.lag_s)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if self.on_create is None or not key.startswith(COMMITS_PREFIX):
            self.inner.put_if_absent(key, data)
        else:
            self.on_create(key, bytes(data))

    def put(self, key: str, data: Buffer) -> None:
        if self.on_put is None:
            self.inner.put(key, data)
        else:
            self.on_put(key, bytes(data))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        if self.on_list is None or prefix != COMMITS_PREFIX:
            return self.inner.list(prefix, after=after)
        return self.on_list(prefix, after)


@pytest.fixture
def log(memory: MemoryBackend, environment: SimulatedEnvironment) -> Log:
    """Return a log on an empty memory backend."""
    return Log(memory, environment, by="ana@node7 1")


# --- the plain way ------------------------------------------------------------------------------
def test_an_empty_store_has_an_empty_catalog(log: Log) -> None:
    """No commit, no run, no version, and no error."""
    catalog = log.refresh()
    assert (catalog.number, catalog.digest, catalog.runs(), ids(catalog)) == (0, "", [], [])


def test_commits_are_numbered_chained_and_visible_to_others(
    log: Log, memory: MemoryBackend, saving: Saving
) -> None:
    """Numbers have no gap, each commit names the one before, a second client sees the same."""
    made = [log.append(saving(step=step)) for step in range(12)]
    assert [commit.number for commit in made] == list(range(1, 13))
    assert all(b.body.previous == a.digest for a, b in pairwise(made))
    other = Log(memory).refresh()
    assert ids(other) == ids(log.catalog) == [f"{n:032x}" for n in range(1, 13)]
    assert [c.digest for c in Log(memory).commits()] == [c.digest for c in made]
    assert made[0].body.by == "ana@node7 1"


def test_the_commit_before_a_new_folder_is_durable_first(
    log: Log, memory: MemoryBackend, saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer may not have synced its name yet, and a commit syncs its own folder only."""
    seen: list[tuple[str, int]] = []

    def synced(keys: Iterable[str]) -> None:
        seen.extend((key, len(commits_of(memory))) for key in keys)

    monkeypatch.setattr(memory, "make_durable", synced)
    monkeypatch.setattr(limits, "COMMITS_PER_FOLDER", 4)
    for step in range(9):
        log.append(saving(step=step))
    assert seen == [(commit_key(3), 3), (commit_key(7), 7)]


def test_the_first_save_creates_its_run_in_the_same_commit(log: Log, saving: Saving) -> None:
    """There is never a moment at which the run exists without its version."""
    commit = log.append(saving("new", directions={"loss": "min"}))
    assert [type(op).__name__ for op in commit.ops] == ["CreateRun", "Save"]
    assert log.catalog.run("new").metrics == {"loss": "min"}


def test_a_failing_build_leaves_nothing(log: Log, memory: MemoryBackend) -> None:
    """What `build` raises comes through, and no commit is written."""
    with pytest.raises(errors.RunNotFoundError):
        log.append(lambda catalog: run_ops.tag(catalog, "nope", "0" * 32, "t"))
    assert commits_of(memory) == []


def test_operations_that_break_an_invariant_are_not_written(
    log: Log, memory: MemoryBackend
) -> None:
    """A writer folds its own commit first: readers never meet a commit that they must refuse."""
    log.append(lambda _: [CreateRun(run="a")])
    with pytest.raises(errors.InvalidInputError, match="cannot be committed"):
        log.append(lambda _: [CreateRun(run="a")])
    with pytest.raises(errors.InvalidInputError):
        log.append(lambda _: [])
    assert len(commits_of(memory)) == 1


def test_a_catalog_does_not_change_under_its_reader(log: Log, saving: Saving) -> None:
    """A reader that holds on to a catalog sees that moment for ever."""
    log.append(saving(step=1, tags=["a"]))
    before = log.catalog
    log.append(saving(step=2, tags=["a"]))
    log.append(lambda c: run_ops.annotate(c, f"{1:032x}", {"x": 1.0}))
    assert ids(before) == [f"{1:032x}"]
    assert before.run("gpt").tags == {"a": f"{1:032x}"}
    assert before.version(f"{1:032x}").metrics == {}
    assert log.catalog.version(f"{1:032x}").metrics == {"x": 1.0}


def test_check_writable_is_asked_before_each_commit(memory: MemoryBackend, saving: Saving) -> None:
    """What the caller forbids is not even tried."""

    def refuse() -> None:
        raise errors.ReadOnlyError("no")

    log = Log(memory, check_writable=refuse)
    with pytest.raises(errors.ReadOnlyError):
        log.append(saving())
    assert commits_of(memory) == []


# --- several writers ----------------------------------------------------------------------------
def test_two_writers_of_one_run_take_turns(memory: MemoryBackend, saving: Saving) -> None:
    """A stale writer loses its number, builds again, and continues the other's version."""
    first, second = Log(memory), Log(memory)
    first.refresh()
    second.refresh()
    first.append(saving(step=1))
    second.append(saving(step=2))
    first.append(saving(step=3))
    versions = list(first.refresh().versions("gpt"))
    assert [v.step for v in versions] == [1, 2, 3]
    assert [v.parent for v in versions] == ["", versions[0].id, versions[1].id]


def test_many_threads_of_one_log(memory: MemoryBackend, saving: Saving) -> None:
    """Concurrent saves of several threads all land, in one chain, without a gap."""
    log = Log(memory)
    builds = [saving(f"run{i % 3}", step=i) for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(log.append, builds))
    assert sorted(commit.number for commit in made) == list(range(1, 65))
    assert Log(memory).refresh().versions_count == 64


def test_many_logs_contend(memory: MemoryBackend, saving: Saving) -> None:
    """Eight clients with a log each: every save lands once, and the chain is whole."""

    def client(number: int) -> None:
        log = Log(memory)
        for step in range(10):
            log.append(saving(f"run{number % 2}", step=step))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client, range(8)))
    commits = list(Log(memory).commits())
    assert [commit.number for commit in commits] == list(range(1, 81))
    for run in ("run0", "run1"):
        versions = list(Log(memory).refresh().versions(run))
        assert [v.parent for v in versions] == ["", *(v.id for v in versions[:-1])]


def test_endless_contention_ends_in_a_conflict(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """A writer that always loses gives up after COMMIT_WAIT_S, by name of the conflict."""
    hook = Hook(memory)
    rival = Log(memory)

    def race(key: str, data: bytes) -> None:
        rival.append(saving("rival"))
        environment.sleep(10)
        memory.put_if_absent(key, data)

    hook.on_create = race
    with pytest.raises(errors.CommitConflictError, match="faster"):
        Log(hook, environment).append(saving())
    assert limits.COMMIT_WAIT_S <= environment.monotonic() < limits.COMMIT_WAIT_S + 60
    assert "gpt" not in [run.name for run in rival.refresh().runs()]


# --- lost replies -------------------------------------------------------------------------------
LOST, GONE = errors.AmbiguousWriteError("timeout"), errors.TransientStorageError("gone")


@pytest.mark.parametrize(
    ("events", "numbers"),
    [
        (["reply lost"], [1]), (["reply gone"], [1]), (["sent twice"], [1]),
        (["request lost"], [1, 1]), (["rival first, lost"], [1, 2]),
        (["rival first"] * 3, [1, 2, 3, 4]),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else str(len(value)),
)  # fmt: skip
def test_a_commit_is_there_once(
    memory: MemoryBackend,
    environment: SimulatedEnvironment,
    saving: Saving,
    events: list[str],
    numbers: list[int],
) -> None:
    """Lost replies are read back, lost requests sent again byte by byte, lost races built anew.

    Requests that arrive long after their client moved on change nothing.
    """
    hook, rival, build = Hook(memory), Log(memory), saving(step=1)
    sent: list[tuple[str, bytes]] = []
    seen: list[int] = []

    def create(key: str, data: bytes) -> None:
        event = events[len(sent)] if len(sent) < len(events) else ""
        sent.append((key, data))
        if event.startswith("rival"):
            rival.append(saving("rival"))
        if event in ("request lost", "rival first, lost"):
            raise LOST
        memory.put_if_absent(key, data)
        if event.startswith("reply"):
            raise LOST if event == "reply lost" else GONE
        if event == "sent twice":
            memory.put_if_absent(key, data)

    def watching(catalog: Catalog) -> list[Op]:
        seen.append(catalog.number)
        return list(build(catalog))

    hook.on_create = create
    log = Log(hook, environment)
    assert log.append(watching).number == len(commits_of(memory)) == numbers[-1]
    assert [key for key, _ in sent] == [commit_key(number) for number in numbers]
    assert len(set(sent)) == len(set(numbers))
    assert seen == [number - 1 for number in sorted(set(numbers))]
    assert environment.monotonic() > 0 or len(set(numbers)) == 1
    log.append(saving(step=2))
    before = [memory.get(key, bytes_max=10**6) for key in commits_of(memory)]
    for key, data in sent:
        with pytest.raises(errors.ObjectExistsError):
            memory.put_if_absent(key, data)
    assert [memory.get(key, bytes_max=10**6) for key in commits_of(memory)] == before
    assert Log(memory).refresh().versions_count == numbers[-1] + 1


def test_what_stays_unclear_is_an_error_and_may_appear_once(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """Never a success without proof; if the write appears later, it is one whole version."""
    hook = Hook(memory)
    held: list[tuple[str, bytes]] = []

    def swallow(key: str, data: bytes) -> None:
        held.append((key, data))
        raise errors.AmbiguousWriteError("timeout")

    hook.on_create = swallow
    log = Log(hook, environment)
    with pytest.raises(errors.AmbiguousWriteError, match=commit_key(1)):
        log.append(saving(step=1))
    assert len(held) == limits.COMMIT_SENDS_MAX
    assert len(set(held)) == 1
    assert log.refresh().number == 0
    memory.put_if_absent(*held[0])
    hook.on_create = None
    assert log.append(saving(step=2)).number == 2
    assert [v.step for v in log.catalog.versions()] == [1, 2]


def test_a_failing_read_back_is_never_a_success(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """The answer was lost and the storage cannot be asked: unclear, although it is there."""
    lost = Fault(calls=frozenset({"put_if_absent"}), when=When.AFTER, error=_ambiguous)
    down = Fault(calls=frozenset({"list"}), at=3, times=0)
    with pytest.raises(errors.AmbiguousWriteError, match="reading back"):
        Log(FaultyBackend(memory, lost, down), environment).append(saving())
    assert len(commits_of(memory)) == 1


def _ambiguous() -> Exception:
    return errors.AmbiguousWriteError("lost")


@pytest.mark.parametrize("error", [errors.StorageFullError, errors.UnsafeBackendError])
def test_a_failure_for_good_leaves_no_version(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving, error: type[Exception]
) -> None:
    """A full disk, or no put-if-absent, is passed on at once, and nothing is committed."""
    fault = Fault(calls=frozenset({"put_if_absent"}), times=0, error=lambda: error("x"))
    log = Log(FaultyBackend(memory, fault), environment)
    with pytest.raises(error):
        log.append(saving())
    assert fault.hits == 1
    assert log.refresh().number == 0


@pytest.mark.parametrize("times", [1, 0])
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER, When.TRUNCATED])
@pytest.mark.parametrize(
    "error", [errors.StorageError, errors.TransientStorageError, errors.AmbiguousWriteError]
)
def test_every_call_failing_in_turn(
    saving: Saving, times: int, when: When, error: type[errors.StorageError]
) -> None:
    """Call n fails, once or for good: told success means there, told failure means not there."""
    for at in range(1, 12):
        memory = MemoryBackend(f"turn/{times}/{when}/{error.__name__}/{at}")
        Log(memory).append(saving(step=0))
        fault = Fault(at=at, times=times, when=when, error=lambda: error("injected"))
        log = Log(FaultyBackend(memory, fault), SimulatedEnvironment())
        outcome = "there"
        try:
            log.append(saving(step=1))
        except errors.AmbiguousWriteError:
            outcome = "unclear"
        except (errors.StorageError, errors.CorruptObjectError):
            outcome = "not there"
        if when is When.TRUNCATED and len(commits_of(memory)) == 2 and outcome != "there":
            with pytest.raises(errors.CorruptObjectError, match=commit_key(2)):
                Log(memory).refresh(writing=True)
            continue
        steps = [v.step for v in Log(memory).refresh().versions()]
        allowed = {"there": [[0, 1]], "not there": [[0]], "unclear": [[0], [0, 1]]}
        assert steps in allowed[outcome], (at, outcome)


def test_a_commit_that_shows_although_the_storage_failed_is_unclear(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """It is visible, but nobody said that it is durable: not a success, not a plain failure."""
    fault = Fault(calls=frozenset({"put_if_absent"}), when=When.AFTER)
    with pytest.raises(errors.AmbiguousWriteError, match="it shows"):
        Log(FaultyBackend(memory, fault), environment).append(saving())


class CreateThenInterrupt(WrapperBackend):
    """Ctrl-C arrives when the commit is written and nobody has said so yet."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.inner.put_if_absent(key, data)
        raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["list", "put_if_absent", "after"])
def test_an_interrupt_leaves_no_wrong_claim(
    memory: MemoryBackend, saving: Saving, moment: str
) -> None:
    """After Ctrl-C at any moment the log goes on, and shows what really happened."""

    def interrupt(_call: str, _key: str) -> None:
        raise KeyboardInterrupt

    landed = moment == "after"
    if landed:
        log = Log(CreateThenInterrupt(memory))
    else:
        fault = Fault(calls=frozenset({moment}), when=When.CALLBACK, callback=interrupt)
        log = Log(FaultyBackend(memory, fault))
    with pytest.raises(KeyboardInterrupt):
        log.append(saving(step=1))
    assert log.catalog.number == 0
    assert Log(memory).append(saving(step=2)).number == 1 + landed
    assert log.refresh().number == 1 + landed


# --- slow to appear -----------------------------------------------------------------------------
def test_only_listed_names_are_opened(memory: MemoryBackend, saving: Saving) -> None:
    """No lookup of a name that may not exist: NFS would remember the failure for 30 s."""

    class Strict(WrapperBackend):
        listed: set[str] = set()  # noqa: RUF012 - one test

        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            """List, and remember."""
            for info in self.inner.list(prefix, after=after):
                self.listed.add(info.key)
                yield info

        def get(self, key: str, *, bytes_max: int) -> bytes:
            """Read what was listed."""
            assert key in self.listed
            return self.inner.get(key, bytes_max=bytes_max)

        def stat(self, key: str) -> ObjectInfo:
            """Refuse: nothing here needs it."""
            raise AssertionError(key)

    one, two = Log(Strict(memory)), Log(Strict(memory))
    for step in range(5):
        one.append(saving(step=step))
        two.append(saving(step=step))
    assert one.refresh().versions_count == 10


def test_a_winner_that_does_not_show_yet_is_waited_for(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """The name is taken, but neither listing nor open shows it for a while: wait, then go on."""
    hook = Hook(memory)
    hook.lag_s = 30.0
    visible_at = 20.0

    def late(prefix: str, after: str) -> Iterator[ObjectInfo]:
        shown = environment.monotonic() >= visible_at
        return memory.list(prefix, after=after) if shown else iter(())

    Log(memory).append(saving(step=1))
    hook.on_list = late
    log = Log(hook, environment)
    assert log.append(saving(step=2)).number == 2
    assert environment.monotonic() >= visible_at


def test_a_winner_that_never_shows_is_unclear(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """The wait is bounded; whose commit it is stays unknown, and that is what is said."""
    hook = Hook(memory)
    hook.lag_s = 100.0
    hook.on_list = lambda _prefix, _after: iter(())
    Log(memory).append(saving(step=1))
    with pytest.raises(errors.AmbiguousWriteError, match="not listed"):
        Log(hook, environment).append(saving(step=2))
    waited = environment.monotonic()
    assert limits.VISIBILITY_WAIT_S <= waited <= limits.VISIBILITY_WAIT_S + 2


def test_a_listed_commit_that_cannot_be_opened_yet_is_waited_for(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """A stale ENOENT after a listing is tried again."""
    Log(memory).append(saving(step=1))
    fault = Fault(
        calls=frozenset({"get"}), times=4, error=lambda: errors.ObjectNotFoundError("stale")
    )
    assert Log(FaultyBackend(memory, fault), environment).refresh().number == 1
    fault = Fault(
        calls=frozenset({"get"}), times=0, error=lambda: errors.ObjectNotFoundError("stale")
    )
    with pytest.raises(errors.CorruptObjectError, match="cannot be opened"):
        Log(FaultyBackend(memory, fault), environment).refresh(writing=True)


def test_a_listing_that_misses_one_is_repeated(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """A directory read that raced a writer shows 3 and not 2: read it again."""
    writer = Log(memory)
    for step in range(3):
        writer.append(saving(step=step))
    hook = Hook(memory)
    listings: list[str] = []

    def torn(prefix: str, after: str) -> Iterator[ObjectInfo]:
        listings.append(after)
        infos = memory.list(prefix, after=after)
        return (i for i in infos if len(listings) > 2 or i.key != commit_key(2))

    hook.on_list = torn
    assert Log(hook, environment).refresh().number == 3
    assert len(listings) == 3


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_log_that_was_cut_short_takes_no_commit(
    memory: MemoryBackend, environment: SimulatedEnvironment, left: int
) -> None:
    """Emptied, or restored to an older state, behind the back of who has it open: he says so.

    His next commit would follow nothing, and make what is there unreadable for everyone.
    """
    log = Log(memory, environment)
    for name in ("a", "b", "c"):
        log.append(lambda now, name=name: run_ops.ensure_run(now, name, {}))  # type: ignore[misc]
    for number in range(left + 1, 4):
        memory.delete(commit_key(number))
    before = commits_of(memory)

    with pytest.raises(errors.CorruptObjectError, match=commit_key(3)):
        log.refresh()
    with pytest.raises(errors.CorruptObjectError, match=commit_key(3)):
        log.append(lambda now: run_ops.ensure_run(now, "d", {}))
    assert commits_of(memory) == before
    assert Log(memory, environment).refresh().number == left


# --- damage -------------------------------------------------------------------------------------
def damage_delete(memory: MemoryBackend) -> None:
    """Take commit 3 away."""
    memory.delete(commit_key(3))


def damage_tear(memory: MemoryBackend) -> None:
    """Cut commit 3 in half."""
    data = memory.get(commit_key(3), bytes_max=10**6)
    replace_object(memory, commit_key(3), data[: len(data) // 2])


def damage_swap(memory: MemoryBackend) -> None:
    """Put commit 2 in the place of commit 3."""
    replace_object(memory, commit_key(3), memory.get(commit_key(2), bytes_max=10**6))


def damage_rewrite(memory: MemoryBackend) -> None:
    """Rewrite commit 2 with a sound digest: 3 no longer follows it."""
    commit = list(Log(memory).commits())[1]
    data, _ = encode_commit(msgspec.structs.replace(commit.body, at_ms=1))
    replace_object(memory, commit_key(2), data)


@pytest.mark.parametrize("damage", [damage_delete, damage_tear, damage_swap, damage_rewrite])
def test_damage_is_named_and_what_comes_before_can_be_read(
    memory: MemoryBackend,
    environment: SimulatedEnvironment,
    saving: Saving,
    damage: Callable[[MemoryBackend], None],
) -> None:
    """The error names the commit; the log before it stays readable; nothing can be committed."""
    writer = Log(memory)
    for step in range(5):
        writer.append(saving(step=step))
    damage(memory)
    log = Log(memory, environment)
    for _ in range(2):
        with pytest.raises(errors.CorruptObjectError, match=commit_key(3)):
            log.refresh()
        assert [v.step for v in log.catalog.versions()] == [0, 1]
    with pytest.raises(errors.CorruptObjectError, match=commit_key(3)):
        log.append(saving(step=9))
    read: list[int] = []
    with pytest.raises(errors.CorruptObjectError, match=commit_key(3)):
        read.extend(commit.number for commit in Log(memory, environment).commits())
    assert len(commits_of(memory)) <= 5


def test_a_changed_history_is_noticed_by_those_who_knew_it(
    memory: MemoryBackend, saving: Saving
) -> None:
    """Another log was put in this one's place: the next commit does not follow what was read."""
    log = Log(memory)
    log.append(saving(step=1))
    memory.delete(commit_key(1))
    other = Log(memory)
    other.append(saving(step=2))
    other.append(saving(step=3))
    with pytest.raises(errors.CorruptObjectError, match="history was changed"):
        log.refresh()


def test_a_newer_operation_is_refused_not_skipped(memory: MemoryBackend, saving: Saving) -> None:
    """What an unknown operation does is unknown: reading stops before it, with the right kind."""
    log = Log(memory)
    log.append(saving(step=1))
    data = memory.get(commit_key(1), bytes_max=10**6)
    raw, digest = decode_envelope(data, where="k")
    newer = raw.replace(b'"number":1', b'"number":2').replace(b'"op":"save"', b'"op":"transmute"')
    newer = newer.replace(b'"previous":""', b'"previous":"' + digest.encode() + b'"')
    memory.put(commit_key(2), encode_envelope(newer))
    with pytest.raises(errors.UnsupportedFeatureError, match="transmute"):
        log.refresh()
    assert log.catalog.number == 1


def test_foreign_objects_among_the_commits_are_left_alone(
    log: Log, memory: MemoryBackend, saving: Saving
) -> None:
    """A README in commits/ is no commit and no gap."""
    memory.put("commits/000000/readme.txt", b"hello")
    memory.put("commits/000000/000000000000.json", b"{}")
    log.append(saving(step=1))
    memory.put("commits/000000/000000000001.json.orig", b"{}")
    log.append(saving(step=2))
    assert Log(memory).refresh().versions_count == 2


def test_a_failing_storage_leaves_an_older_catalog(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """A listing or a read that fails is the storage's error, and the next refresh goes on."""
    writer = Log(memory)
    for step in range(3):
        writer.append(saving(step=step))
    for call in ("list", "get"):
        fault = Fault(calls=frozenset({call}), at=2)
        log = Log(FaultyBackend(memory, fault), environment)
        with pytest.raises(errors.StorageError, match="injected"):
            log.refresh()
        assert log.refresh().number == 3


# --- a single writer ----------------------------------------------------------------------------
def test_a_single_writer_never_uses_put_if_absent(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """On storage without the condition, commits are plain puts."""
    fault = Fault(calls=frozenset({"put_if_absent"}), times=0)
    log = Log(FaultyBackend(memory, fault), environment, single_writer=True)
    for step in range(3):
        log.append(saving(step=step))
    assert fault.seen == 0
    assert Log(memory).refresh().versions_count == 3


def test_a_second_writer_is_noticed(memory: MemoryBackend, saving: Saving) -> None:
    """A foreign commit after one's own means that two are at work."""
    one = Log(memory, single_writer=True)
    one.append(saving(step=1))
    Log(memory, single_writer=True).append(saving(step=2))
    with pytest.raises(errors.CommitConflictError, match="two writers"):
        one.append(saving(step=3))
    assert len(commits_of(memory)) == 2


def test_a_second_writer_between_look_and_write_is_noticed(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """Someone overwrites the commit at once: the read-back says so."""
    hook = Hook(memory)
    rival = Hook(memory)
    taken: list[bytes] = []
    rival.on_put = lambda _key, data: taken.append(data)
    with pytest.raises(errors.AmbiguousWriteError):
        Log(rival, environment, single_writer=True).append(saving("rival"))
    hook.on_put = lambda key, _data: memory.put(key, taken[0])
    with pytest.raises(errors.CommitConflictError, match="another's"):
        Log(hook, environment, single_writer=True).append(saving())


def test_an_overwritten_commit_is_noticed_at_the_next(
    memory: MemoryBackend, saving: Saving
) -> None:
    """A rival with a stale view replaced this writer's last commit."""
    one, two = Log(memory, single_writer=True), Log(memory, single_writer=True)
    one.append(saving("one"))
    mine = memory.get(commit_key(1), bytes_max=10**6)
    memory.delete(commit_key(1))
    two.append(saving("two"))
    assert memory.get(commit_key(1), bytes_max=10**6) != mine
    with pytest.raises(errors.CommitConflictError, match="replaced"):
        one.append(saving("one", step=1))


@pytest.mark.parametrize("shown", [0, 2])
def test_a_single_writer_does_not_believe_a_short_listing(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving, shown: int
) -> None:
    """A listing that lacks the last commits is damage: nothing is written over what it hides."""
    writer = Log(memory, single_writer=True)
    for step in range(3):
        writer.append(saving(step=step))
    before = {key: memory.get(key, bytes_max=10**6) for key in commits_of(memory)}
    hook = Hook(memory)
    hook.on_list = lambda prefix, after: iter(
        [info for info in memory.list(prefix, after=after) if info.key <= commit_key(shown)]
    )
    writes: list[str] = []
    hook.on_put = lambda key, _data: writes.append(key)
    with pytest.raises(errors.IntegrityError, match="not listed") as caught:
        Log(hook, environment, single_writer=True).append(saving("other"))
    assert caught.value.hint
    assert not writes
    assert {key: memory.get(key, bytes_max=10**6) for key in commits_of(memory)} == before


def test_a_single_writer_does_not_go_on_before_its_newest_snapshot(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """A log that ends before a sound snapshot has lost commits; a damaged snapshot says nothing."""
    writer = Log(memory, single_writer=True)
    for step in range(3):
        writer.append(saving(step=step))
    assert snapshots.write(memory, writer.catalog, single_writer=True)
    for number in (2, 3):
        memory.delete(commit_key(number))
    with pytest.raises(errors.IntegrityError, match="the log ends before"):
        Log(memory, environment, single_writer=True).append(saving("other"))
    assert len(commits_of(memory)) == 1
    memory.delete(snapshot_key(3))
    memory.put(snapshot_key(3), b"damaged")
    assert Log(memory, environment, single_writer=True).append(saving("other")).number == 2


def test_a_taken_commit_is_another_writers(
    memory: MemoryBackend, environment: SimulatedEnvironment, saving: Saving
) -> None:
    """Storage that refuses to replace a commit tells of a second writer."""
    hook = Hook(memory)

    def taken(key: str, _data: bytes) -> None:
        raise errors.ObjectExistsError(key)

    hook.on_put = taken
    with pytest.raises(errors.CommitConflictError, match="two writers"):
        Log(hook, environment, single_writer=True).append(saving())


# --- processes ----------------------------------------------------------------------------------
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_does_not_inherit_a_held_lock(memory: MemoryBackend, saving: Saving) -> None:
    """The child of a process whose other thread was committing can refresh and commit."""
    hook = Hook(memory)
    inside, leave = threading.Event(), threading.Event()

    def slow(key: str, data: bytes) -> None:
        inside.set()
        assert leave.wait(120)
        memory.put_if_absent(key, data)

    hook.on_create = slow
    log = Log(hook)
    thread = threading.Thread(target=lambda: log.append(saving(step=1)))
    thread.start()
    assert inside.wait(120)
    child = os.fork()
    if child == 0:
        hook.on_create = None
        os._exit(0 if log.append(saving(step=2)).number == 1 else 1)
    status = os.waitpid(child, 0)[1]
    leave.set()
    thread.join(120)
    assert os.waitstatus_to_exitcode(status) == 0
    assert log.catalog.number == 1
