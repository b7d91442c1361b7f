"""Records of keys: one data key, rotations that may die anywhere, records that others planted."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from faultkit.stores import trusting

import ckptstore
from ckptstore import errors, keyring, limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.sealing import DataKey, UserKey, unwrap, wrap
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import Environment, Options
from ckptstore.format.encryption import KeyRecord, decode_key_record, wrapping_context
from ckptstore.format.framing import encode_envelope
from ckptstore.format.keys import STORE_KEY, key_record_key
from ckptstore.maintenance.repair.fix_opening import mend_keys
from ckptstore.repo import Finding, Repo, create_on, open_on
from ckptstore.testing.faulty import CALLS, Fault, FaultyBackend, When

A, B, C = (UserKey(bytes([n]) * 31 + b"x") for n in (1, 2, 3))


def create(backend: Backend, key: UserKey | None = A, *, exist_ok: bool = False) -> Repo:
    """Create a store without a probe."""
    return create_on(backend, key=key, exist_ok=exist_ok, prober=trusting)


def opens(backend: Backend, key: UserKey) -> bool:
    """Return whether a key opens the store."""
    try:
        open_on(backend, key=key, prober=trusting)
    except (errors.WrongKeyError, errors.CorruptObjectError):
        return False
    return True


class Killed(Exception):
    """The process ended."""


# --- creating -----------------------------------------------------------------------------------
def test_creating_and_opening(memory: MemoryBackend) -> None:
    """A store opens with its key alone, and a plain one with none."""
    made = create(memory)
    assert open_on(memory, key=A, prober=trusting).superblock == made.superblock
    with pytest.raises(errors.MissingKeyError, match="no key was given") as caught:
        open_on(memory, prober=trusting)
    for way in ("file:PATH", "env:NAME", "command:CMD", "--key", "CKPTSTORE_KEY"):
        assert way in caught.value.hint
    told = f"{memory.url} is encrypted with another key: it wants {A.id}, not {B.id}"
    with pytest.raises(errors.WrongKeyError, match=told):
        open_on(memory, key=B, prober=trusting)
    with pytest.raises(errors.StoreExistsError):
        create(memory)
    with pytest.raises(errors.WrongKeyError):
        create(memory, B, exist_ok=True)


def test_of_many_creators_of_one_key_one_wins(memory: MemoryBackend) -> None:
    """All others find the same store and the same data key."""
    gate = threading.Barrier(8)

    def work(_: int) -> Repo:
        gate.wait(120)
        return create(memory, exist_ok=True)

    with ThreadPoolExecutor(8) as pool:
        repos = list(pool.map(work, range(8)))
    assert len({repo.superblock.store_id for repo in repos}) == 1
    assert len([key for key in memory.objects if key.startswith("keys/")]) == 1
    for number, repo in enumerate(repos):
        repo.backend.put(f"packs/ab/{number}", b"written by one")
        assert repos[-1].backend.get(f"packs/ab/{number}", bytes_max=99) == b"written by one"


def test_creators_of_two_keys_do_not_mix(memory: MemoryBackend) -> None:
    """The store is one's, and the other is told that its key is wrong."""
    gate = threading.Barrier(2)

    def work(key: UserKey) -> bool:
        gate.wait(120)
        try:
            create(memory, key, exist_ok=True)
        except errors.WrongKeyError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(work, [A, B]))
    assert sorted(won) == [False, True]
    assert [opens(memory, A), opens(memory, B)] == won


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_a_creator_that_dies_leaves_nothing_that_locks_out(when: When) -> None:
    """After a death at any call the same key creates the store, or opens it; no key is lost."""
    for at in range(1, 40):
        memory = MemoryBackend(f"dying-creator-{when}-{at}")
        fault = Fault(calls=CALLS, at=at, when=when, error=Killed)
        with contextlib.suppress(Killed):
            create(FaultyBackend(memory, fault))
        if not fault.hits:
            break
        if key_record_key(1) in memory.objects and STORE_KEY not in memory.objects:
            with pytest.raises(errors.StoreExistsError, match="began to create an encrypted store"):
                create(memory, None)
            with pytest.raises(errors.WrongKeyError):
                create(memory, B)
        assert STORE_KEY not in memory.objects or key_record_key(1) in memory.objects
        create(memory, exist_ok=True)
        assert opens(memory, A)
    else:
        pytest.fail("creating takes fewer calls than that")
    assert at > 5


@pytest.mark.parametrize("error", [errors.AmbiguousWriteError, errors.StorageError])
def test_lost_replies_while_creating(error: type[errors.CkptStoreError]) -> None:
    """Whatever reply is lost: a store is made and opens, or an error says that it is not known."""
    for at in range(1, 3):
        memory = MemoryBackend(f"lost-creator-{error.__name__}-{at}")
        fault = Fault(
            calls=frozenset({"put_if_absent"}), at=at, when=When.AFTER, error=lambda: error("lost")
        )
        with contextlib.suppress(errors.CkptStoreError):
            create(FaultyBackend(memory, fault))
        create(memory, exist_ok=True)
        assert opens(memory, A)


def test_a_plain_creator_between_the_two_objects(memory: MemoryBackend) -> None:
    """The one that comes second is told, and takes its record of keys away again."""

    def create_plain(call: str, key: str) -> None:
        if key == STORE_KEY and STORE_KEY not in memory.objects:
            record = memory.objects[key_record_key(1)]
            memory.delete(key_record_key(1))
            create(memory, None)
            memory.put(key_record_key(1), record.data)

    race = Fault(
        calls=frozenset({"put_if_absent"}), at=2, when=When.CALLBACK, callback=create_plain
    )
    with pytest.raises(errors.EncryptionKeyError, match="is not encrypted"):
        create(FaultyBackend(memory, race), exist_ok=True)
    assert set(memory.objects) == {STORE_KEY}
    open_on(memory, prober=trusting)


# --- rotating -----------------------------------------------------------------------------------
def test_rotation(memory: MemoryBackend) -> None:
    """The new key opens, the old one does not, and no object of the store was touched."""
    repo = create(memory)
    repo.backend.put("packs/ab/x", b"data")
    before = memory.objects["packs/ab/x"], memory.objects[STORE_KEY]
    done = keyring.rotate(memory, A, B)
    assert (done.record, done.keys, done.dropped) == (2, (B.id,), (A.id,))
    assert done.deleted == (key_record_key(1),)
    assert not opens(memory, A)
    again = open_on(memory, key=B, prober=trusting)
    assert again.backend.get("packs/ab/x", bytes_max=9) == b"data"
    assert (memory.objects["packs/ab/x"], memory.objects[STORE_KEY]) == before
    repo.backend.put("packs/ab/y", b"by who had it open")
    assert again.backend.get("packs/ab/y", bytes_max=99) == b"by who had it open"
    with pytest.raises(errors.WrongKeyError):
        keyring.rotate(memory, A, C)


def test_rotation_little_by_little(memory: MemoryBackend) -> None:
    """Old keys are kept on request, and dropped by the next rotation; both are bounded."""
    create(memory)
    keyring.rotate(memory, A, B, keep_old=True)
    assert opens(memory, A)
    assert opens(memory, B)
    assert keyring.rotate(memory, A, B, keep_old=True).keys == (A.id, B.id)
    assert keyring.rotate(memory, B, B).dropped == (A.id,)
    assert not opens(memory, A)
    for number in range(limits.KEY_SLOTS_MAX - 1):
        keyring.rotate(memory, B, UserKey(bytes([number]) + b"y" * 31), keep_old=True)
    with pytest.raises(errors.LimitError, match="1 to 16 keys"):
        keyring.rotate(memory, B, C, keep_old=True)
    assert opens(memory, B)


@pytest.mark.parametrize("keep_old", [False, True])
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_a_rotation_that_dies_leaves_a_store_that_opens(when: When, keep_old: bool) -> None:
    """At every call: one of the two keys opens; finishing needs only another rotation."""
    for at in range(1, 40):
        memory = MemoryBackend(f"dying-rotation-{when}-{keep_old}-{at}")
        create(memory)
        keyring.rotate(memory, A, A)
        fault = Fault(calls=CALLS, at=at, when=when, error=Killed)
        with contextlib.suppress(Killed):
            keyring.rotate(FaultyBackend(memory, fault), A, B, keep_old=keep_old)
        if not fault.hits:
            break
        now = A if opens(memory, A) else B
        assert opens(memory, now)
        keyring.rotate(memory, now, C)
        assert opens(memory, C)
        assert len([key for key in memory.objects if key.startswith("keys/")]) == 1
    else:
        pytest.fail("a rotation takes fewer calls than that")
    assert at > 4


@pytest.mark.parametrize("error", [errors.AmbiguousWriteError, errors.StorageError])
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER, When.TRUNCATED])
def test_a_rotation_on_failing_storage(when: When, error: type[errors.CkptStoreError]) -> None:
    """Each call fails once: the rotation is done, or raises, and the store opens."""
    for at in range(1, 40):
        memory = MemoryBackend(f"failing-rotation-{when}-{error.__name__}-{at}")
        create(memory)
        calls = CALLS if when is not When.TRUNCATED else frozenset({"get", "list"})
        fault = Fault(calls=calls, at=at, when=when, error=lambda: error("failed"))
        try:
            keyring.rotate(FaultyBackend(memory, fault), A, B)
        except errors.CkptStoreError as found:
            told = isinstance(found, errors.AmbiguousWriteError) or when is When.AFTER
            assert opens(memory, A) or (opens(memory, B) and told)
        else:
            assert opens(memory, B)
        if not fault.hits:
            break


def test_rotations_at_once(memory: MemoryBackend) -> None:
    """Of many at once each builds on the one before, or is told that its key opens no more."""
    create(memory)
    keys = [UserKey(bytes([n]) * 31 + b"z") for n in range(10, 18)]
    gate = threading.Barrier(len(keys))

    def work(key: UserKey) -> bool:
        gate.wait(120)
        try:
            keyring.rotate(memory, A, key)
        except errors.WrongKeyError:
            return False
        return True

    with ThreadPoolExecutor(len(keys)) as pool:
        won = list(pool.map(work, keys))
    assert sum(won) == 1
    assert [opens(memory, key) for key in keys] == won


def test_rotations_there_and_back_at_once(memory: MemoryBackend) -> None:
    """The record that counts is never deleted, however rotations to and fro interleave."""
    create(memory)
    gate = threading.Barrier(4)

    def work(pair: tuple[UserKey, UserKey]) -> None:
        gate.wait(120)
        for _ in range(20):
            with contextlib.suppress(errors.WrongKeyError, errors.AmbiguousWriteError):
                keyring.rotate(memory, *pair)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [(A, B), (B, A), (A, B), (B, A)]))
    assert opens(memory, A) or opens(memory, B)


def test_the_command_of_python(tmp_path: Path, key: bytes, other: bytes) -> None:
    """``ckptstore.rotate_key`` does it for a location; a plain store has nothing to rotate."""
    with ckptstore.open(tmp_path / "s", create=True, encryption_key=key) as store:
        store.run("r").save({"x": torch.ones(5)}, step=1)
    ckptstore.rotate_key(tmp_path / "s", encryption_key=key, new_key=other)
    with pytest.raises(errors.WrongKeyError):
        ckptstore.open(tmp_path / "s", encryption_key=key)
    with ckptstore.open(tmp_path / "s", encryption_key=other) as store:
        assert store.load("r@1")["x"].sum() == 5
    ckptstore.open(tmp_path / "plain", create=True).close()
    with pytest.raises(errors.EncryptionKeyError):
        ckptstore.rotate_key(tmp_path / "plain", encryption_key=key, new_key=other)


# --- store.json is lost -------------------------------------------------------------------------
def test_a_lost_superblock_comes_back_from_the_keys(
    tmp_path: Path, key: bytes, other: bytes
) -> None:
    """Whole, with the store's own id; never without the key."""
    place = tmp_path / "s"
    with ckptstore.open(place, create=True, encryption_key=key, chunk_bytes=1 << 17) as store:
        before = store.info
        store.run("r").save({"x": torch.ones(5)}, step=1)
    for damage in (None, b"garbage"):
        (place / STORE_KEY).unlink()
        if damage is not None:
            (place / STORE_KEY).write_bytes(damage)
        with pytest.raises(errors.MissingKeyError):
            ckptstore.mend_superblock(place)
        with pytest.raises(errors.WrongKeyError):
            ckptstore.mend_superblock(place, encryption_key=other)
        found = ckptstore.mend_superblock(
            place, encryption_key=key, single_writer=damage is not None
        )
        assert found is not None
        assert (found.source, found.new, found.mended) == ("keys", ("by",), True)
        with ckptstore.open(place, encryption_key=key) as store:
            told = store.info
            assert told.encryption == before.encryption
            assert (told.store_id, told.chunk_bytes) == (before.store_id, before.chunk_bytes)
            assert told.created_at_ms == before.created_at_ms
            assert store.verify().ok
    with ckptstore.open(tmp_path / "plain", create=True) as store:
        store.run("r").save({"x": torch.ones(5)}, step=1)
    (tmp_path / "plain" / STORE_KEY).unlink()
    with pytest.raises(errors.EncryptionKeyError, match="nothing at"):
        ckptstore.mend_superblock(tmp_path / "plain", encryption_key=key)


def test_without_its_keys_a_store_is_lost_and_says_so(tmp_path: Path, key: bytes) -> None:
    """The record of keys must be backed up; a copy of it opens the store again."""
    place = tmp_path / "s"
    with ckptstore.open(place, create=True, encryption_key=key) as store:
        store.run("r").save({"x": torch.ones(5)}, step=1)
    record = place / key_record_key(1)
    saved = record.read_bytes()
    record.unlink()
    with pytest.raises(errors.CorruptObjectError, match="restore keys/ from a backup"):
        ckptstore.open(place, encryption_key=key)
    record.write_bytes(saved)
    with ckptstore.open(place, encryption_key=key, read_only=True) as store:
        assert store.verify().ok


def test_a_single_writer_rotates_without_conditions(memory: MemoryBackend) -> None:
    """Where storage has no put-if-absent, whoever is alone creates and rotates all the same."""

    def ignored(_: Backend, __: Environment) -> Finding:
        return Finding(put_if_absent=PutIfAbsent.IGNORED, report={})

    create_on(memory, key=A, options=Options(single_writer=True), prober=ignored)
    keyring.rotate(memory, A, B, conditional=False)
    assert opens(memory, B)


LAST = limits.COMMIT_NUMBER_MAX


@pytest.fixture
def place(request: pytest.FixtureRequest) -> MemoryBackend:
    """Return the storage of a store that one key opens."""
    backend = MemoryBackend(f"planted/{request.node.nodeid}")
    create_on(backend, key=A, prober=trusting)
    return backend


def _read(backend: Backend, number: int) -> bytes:
    return backend.get(key_record_key(number), bytes_max=limits.KEY_RECORD_BYTES_MAX)


def _renumbered(data: bytes, number: int, **changes: object) -> bytes:
    """Return a record under another number, as somebody without a key would write it."""
    body = json.loads(data)["body"]
    return encode_envelope(json.dumps({**body, "number": number, **changes}).encode())


def _before_seals(backend: Backend, number: int = 1) -> bytes:
    """Put a record in the place of one, as it was written before there were seals."""
    record = decode_key_record(_read(backend, number), where="keys")
    data_key = unwrap(record, A, where="keys")
    (slot,) = record.slots
    cipher = A.wrapping(bytes.fromhex(slot.salt))
    wrapped = data_key.wrapped_by(cipher, wrapping_context(record, A.id, sealed=False))
    body = json.loads(_read(backend, number))["body"]
    del body["seal"]
    body["slots"] = [{"key": slot.key, "salt": slot.salt, "wrapped": wrapped.hex()}]
    body["format"] = 1
    data = encode_envelope(json.dumps(body).encode())
    backend.put(key_record_key(number), data)
    return data


def test_a_record_is_bound_to_its_number(place: MemoryBackend) -> None:
    """One from before a rotation, put back under a higher number, opens nothing."""
    old = _read(place, 1)
    keyring.rotate(place, A, B)
    for number in (3, LAST):
        place.put(key_record_key(number), _renumbered(old, number))
        with pytest.raises(errors.CorruptObjectError, match="its seal is not its") as caught:
            open_on(place, key=A, prober=trusting)
        assert "ckptstore key mend" in str(caught.value.hint)
        place.delete(key_record_key(number))
    assert opens(place, B)


@pytest.mark.parametrize("change", ["seal", "format", "slot", "by", "at_ms", "more", "strip"])
def test_everything_in_a_record_is_bound(place: MemoryBackend, change: str) -> None:
    """Whoever changes anything, or takes the seal away, has a record that opens nothing."""
    body = json.loads(_read(place, 1))["body"]
    (slot,) = body["slots"]
    changes: dict[str, dict[str, object]] = {
        "seal": {"seal": "0" * 64}, "format": {"format": 1},
        "slot": {"slots": [slot, {**slot, "key": B.id}]}, "by": {"by": "somebody else"},
        "at_ms": {"at_ms": body["at_ms"] + 1}, "more": {"slots": [slot, slot]},
        "strip": {"format": 1, "seal": "", "slots": [{**slot, "sealed": False}]},
    }  # fmt: skip
    place.put(key_record_key(1), _renumbered(_read(place, 1), 1, **changes[change]))
    with pytest.raises(errors.CorruptObjectError):
        open_on(place, key=A, prober=trusting)


def test_a_slot_with_another_store_s_key_opens_nothing(place: MemoryBackend) -> None:
    """Slot and seal fit each other; the check in the superblock's terms is of the store's key."""
    record = decode_key_record(_read(place, 1), where="keys")
    other = DataKey(bytes(range(32)))
    slot = wrap(record, other, A, bytes(range(32)))
    planted: KeyRecord = msgspec.structs.replace(record, slots=(slot,))
    planted = msgspec.structs.replace(planted, seal=other.seal_of(planted))
    with pytest.raises(errors.CorruptObjectError, match="does not open"):
        unwrap(planted, A, where="keys")
    both = msgspec.structs.replace(planted, slots=(slot, *record.slots))
    both = msgspec.structs.replace(both, seal=unwrap(record, A, where="keys").seal_of(both))
    assert unwrap(both, A, where="keys").check(record.store_id) == record.encryption.check


def test_records_from_before_seals_are_read_and_get_one(place: MemoryBackend) -> None:
    """They open the store; the next rotation, to the same key too, writes one with a seal."""
    _before_seals(place)
    assert opens(place, A)
    keyring.rotate(place, A, A)
    record = decode_key_record(_read(place, 2), where="keys")
    assert record.seal
    assert [slot.sealed for slot in record.slots] == [True]
    assert opens(place, A)


def test_old_slots_that_are_kept_go_on_to_open(place: MemoryBackend) -> None:
    """A rotation that keeps keys keeps slots that it cannot wrap anew."""
    _before_seals(place)
    keyring.rotate(place, A, B, keep_old=True)
    record = decode_key_record(_read(place, 2), where="keys")
    assert [slot.sealed for slot in record.slots] == [False, True]
    assert opens(place, A)
    assert opens(place, B)


@pytest.mark.parametrize("what", ["garbage", "other key", "newer format", "copy"])
@pytest.mark.parametrize("number", [7, 999_999_999])
def test_what_was_planted_is_named_and_can_go(place: MemoryBackend, number: int, what: str) -> None:
    """An error with the way out; after that the store opens as before, and rotates."""
    keyring.rotate(place, A, B, keep_old=True)
    other = MemoryBackend(f"other-{number}-{what}")
    create_on(other, key=C, prober=trusting)
    planted = {
        "garbage": b"{}",
        "other key": _renumbered(_read(other, 1), number),
        "newer format": _renumbered(_read(place, 2), number, format=9),
        "copy": _renumbered(_read(place, 2), number),
    }
    place.put(key_record_key(number), planted[what])
    with pytest.raises(errors.CkptStoreError) as caught:
        open_on(place, key=B, prober=trusting)
    assert "ckptstore key mend" in str(caught.value.hint)
    with pytest.raises(errors.CkptStoreError):
        keyring.rotate(place, B, C)

    foreseen = mend_keys(place, B, dry_run=True)
    assert len(keyring.record_numbers(place)) == 2
    done = mend_keys(place, B)
    assert (done.record, done.kept) == (2, True)
    assert done.deleted == foreseen.deleted == (key_record_key(number),)
    assert opens(place, A)
    assert opens(place, B)
    assert keyring.rotate(place, B, C).record == 3
    assert not mend_keys(place, C).deleted


def test_a_copy_of_a_record_without_seal_blocks_nothing(place: MemoryBackend) -> None:
    """Of a store from before seals it opens; the last number there is can be got rid of."""
    data = _before_seals(place)
    place.put(key_record_key(LAST), _renumbered(data, LAST))
    assert opens(place, A)
    with pytest.raises(errors.LimitError, match="the last number") as caught:
        keyring.rotate(place, A, B)
    assert "ckptstore key mend" in str(caught.value.hint)
    done = mend_keys(place, A)
    assert not done.kept
    assert set(done.deleted) == {key_record_key(1), key_record_key(LAST)}
    assert keyring.record_numbers(place) == [done.record]
    assert keyring.rotate(place, A, B).keys == (B.id,)
    assert opens(place, B)
    assert not opens(place, A)


def test_a_rotation_that_was_killed_may_look_the_same(place: MemoryBackend) -> None:
    """Both records are there: the new key opens the store, and the old one is told what it may."""
    old = _read(place, 1)
    keyring.rotate(place, A, B)
    place.put(key_record_key(1), old)
    assert opens(place, B)
    with pytest.raises(errors.WrongKeyError, match="wants") as caught:
        open_on(place, key=A, prober=trusting)
    assert "unless somebody has just rotated" in str(caught.value.hint)
    assert mend_keys(place, B).deleted == (key_record_key(1),)


def test_a_key_that_opens_nothing_mends_nothing(place: MemoryBackend) -> None:
    """Nobody takes away what he has no key for; no store, a plain one and lost keys are told."""
    before = _read(place, 1)
    with pytest.raises(errors.WrongKeyError, match="opens none of 1"):
        mend_keys(place, C)
    assert _read(place, 1) == before
    place.put(key_record_key(1), b"")
    with pytest.raises(errors.CorruptObjectError, match="can be read"):
        mend_keys(place, A)
    plain = MemoryBackend("planted-plain")
    with pytest.raises(errors.StoreNotFoundError):
        mend_keys(plain, A)
    create_on(plain, prober=trusting, exist_ok=True)
    with pytest.raises(errors.EncryptionKeyError, match="is not encrypted"):
        mend_keys(plain, A)


def test_too_many_are_not_looked_at(place: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is bounded, whoever has filled the folder."""
    monkeypatch.setattr(limits, "KEY_RECORDS_MAX", 3)
    for number in range(2, 6):
        place.put(key_record_key(number), b"{}")
    with pytest.raises(errors.LimitError, match="5 records"):
        mend_keys(place, A)


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_mending_that_dies_anywhere_is_done_by_the_next(when: When) -> None:
    """At every call: no record that opens the store is deleted before another one is there."""
    at = 0
    while True:
        at += 1
        backend = MemoryBackend(f"planted-kills-{when}-{at}")
        create_on(backend, key=A, prober=trusting)
        data = _before_seals(backend)
        for number in (5, LAST):
            backend.put(key_record_key(number), _renumbered(data, number))
        backend.put(key_record_key(LAST - 1), b"{}")
        fault = Fault(at=at, when=when)
        try:
            mend_keys(FaultyBackend(backend, fault), A)
        except errors.StorageError:
            assert mend_keys(backend, A).record in keyring.record_numbers(backend)
        finished = fault.seen < at
        assert len(keyring.record_numbers(backend)) == 1
        assert opens(backend, A)
        if finished:
            break
    assert at > 5


class _Meanwhile(WrapperBackend):
    """A storage where something else happens just before the first record is deleted."""

    def __init__(self, inner: Backend, work: Callable[[], object]) -> None:
        super().__init__(inner)
        self._work: Callable[[], object] | None = work

    def delete(self, key: str) -> None:
        work, self._work = self._work, None
        if work:
            work()
        self.inner.delete(key)


@pytest.mark.short(sample=1)
@pytest.mark.parametrize("first", ["rotation", "mending"])
def test_each_would_delete_the_record_that_the_other_keeps(
    place: MemoryBackend, first: str
) -> None:
    """A rotation, or mending, and mending by another key at once: one that opens it is left."""
    old = _read(place, 1)
    if first == "rotation":
        keyring.rotate(_Meanwhile(place, lambda: mend_keys(place, A)), A, B)
    else:
        keyring.rotate(place, A, B)
        place.put(key_record_key(1), old)  # the rotation has not deleted it yet
        mend_keys(_Meanwhile(place, lambda: mend_keys(place, B)), A)
    assert opens(place, A if first == "mending" else B)


def test_the_seal_is_of_one_store(place: MemoryBackend) -> None:
    """Two stores of one data key would not have one seal: the store's id is part of it."""
    record = decode_key_record(_read(place, 1), where="keys")
    data_key: DataKey = unwrap(record, A, where="keys")
    other: KeyRecord = msgspec.structs.replace(record, store_id="0" * 31 + "1")
    assert data_key.seal_of(other) != data_key.seal_of(record)
