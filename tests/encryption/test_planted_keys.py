"""Records of keys that somebody without the key has put there: they open nothing, and can go."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from ckptstore import keyring, limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.sealing import DataKey, UserKey, unwrap, wrap
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import Environment
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    EncryptionKeyError,
    LimitError,
    StorageError,
    StoreNotFoundError,
    WrongKeyError,
)
from ckptstore.format.encryption import KeyRecord, decode_key_record, wrapping_context
from ckptstore.format.framing import encode_envelope
from ckptstore.format.keys import key_record_key
from ckptstore.maintenance.repair.fix_keys import mend_keys
from ckptstore.repo import Finding, create_on, open_on
from ckptstore.testing.faulty import Fault, FaultyBackend, When

A, B, C = (UserKey(bytes([n]) * 31 + b"x") for n in (1, 2, 3))
LAST = limits.COMMIT_NUMBER_MAX


def _atomic(_: Backend, __: Environment) -> Finding:
    return Finding(put_if_absent=PutIfAbsent.ATOMIC, report={})


@pytest.fixture
def place(request: pytest.FixtureRequest) -> MemoryBackend:
    """Return the storage of a store that one key opens."""
    backend = MemoryBackend(f"planted/{request.node.nodeid}")
    create_on(backend, key=A, prober=_atomic)
    return backend


def _opens(backend: Backend, key: UserKey) -> bool:
    try:
        open_on(backend, key=key, prober=_atomic)
    except (WrongKeyError, CorruptObjectError):
        return False
    return True


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
        with pytest.raises(CorruptObjectError, match="its seal is not its") as caught:
            open_on(place, key=A, prober=_atomic)
        assert "ckptstore key mend" in str(caught.value.hint)
        place.delete(key_record_key(number))
    assert _opens(place, B)


@pytest.mark.parametrize("change", ["seal", "format", "slot", "by", "at_ms", "more", "strip"])
def test_everything_in_a_record_is_bound(place: MemoryBackend, change: str) -> None:
    """Whoever changes anything, or takes the seal away, has a record that opens nothing."""
    body = json.loads(_read(place, 1))["body"]
    (slot,) = body["slots"]
    changes: dict[str, dict[str, object]] = {
        "seal": {"seal": "0" * 64},
        "format": {"format": 1},
        "slot": {"slots": [slot, {**slot, "key": B.id}]},
        "by": {"by": "somebody else"},
        "at_ms": {"at_ms": body["at_ms"] + 1},
        "more": {"slots": [slot, slot]},
        "strip": {"format": 1, "seal": "", "slots": [{**slot, "sealed": False}]},
    }
    place.put(key_record_key(1), _renumbered(_read(place, 1), 1, **changes[change]))
    with pytest.raises(CorruptObjectError):
        open_on(place, key=A, prober=_atomic)


def test_a_slot_with_another_store_s_key_opens_nothing(place: MemoryBackend) -> None:
    """Slot and seal fit each other; the check in the superblock's terms is of the store's key."""
    record = decode_key_record(_read(place, 1), where="keys")
    other = DataKey(bytes(range(32)))
    slot = wrap(record, other, A, bytes(range(32)))
    planted: KeyRecord = msgspec.structs.replace(record, slots=(slot,))
    planted = msgspec.structs.replace(planted, seal=other.seal_of(planted))
    with pytest.raises(CorruptObjectError, match="does not open"):
        unwrap(planted, A, where="keys")
    both = msgspec.structs.replace(planted, slots=(slot, *record.slots))
    both = msgspec.structs.replace(both, seal=unwrap(record, A, where="keys").seal_of(both))
    assert unwrap(both, A, where="keys").check(record.store_id) == record.encryption.check


def test_records_from_before_seals_are_read_and_get_one(place: MemoryBackend) -> None:
    """They open the store; the next rotation, to the same key too, writes one with a seal."""
    _before_seals(place)
    assert _opens(place, A)
    keyring.rotate(place, A, A)
    record = decode_key_record(_read(place, 2), where="keys")
    assert record.seal
    assert [slot.sealed for slot in record.slots] == [True]
    assert _opens(place, A)


def test_old_slots_that_are_kept_go_on_to_open(place: MemoryBackend) -> None:
    """A rotation that keeps keys keeps slots that it cannot wrap anew."""
    _before_seals(place)
    keyring.rotate(place, A, B, keep_old=True)
    record = decode_key_record(_read(place, 2), where="keys")
    assert [slot.sealed for slot in record.slots] == [False, True]
    assert _opens(place, A)
    assert _opens(place, B)


@pytest.mark.parametrize("what", ["garbage", "other key", "newer format", "copy"])
@pytest.mark.parametrize("number", [7, 999_999_999])
def test_what_was_planted_is_named_and_can_go(place: MemoryBackend, number: int, what: str) -> None:
    """An error with the way out; after that the store opens as before, and rotates."""
    keyring.rotate(place, A, B, keep_old=True)
    other = MemoryBackend(f"other-{number}-{what}")
    create_on(other, key=C, prober=_atomic)
    planted = {
        "garbage": b"{}",
        "other key": _renumbered(_read(other, 1), number),
        "newer format": _renumbered(_read(place, 2), number, format=9),
        "copy": _renumbered(_read(place, 2), number),
    }
    place.put(key_record_key(number), planted[what])
    with pytest.raises(CkptStoreError) as caught:
        open_on(place, key=B, prober=_atomic)
    assert "ckptstore key mend" in str(caught.value.hint)
    with pytest.raises(CkptStoreError):
        keyring.rotate(place, B, C)

    foreseen = mend_keys(place, B, dry_run=True)
    assert len(keyring.record_numbers(place)) == 2
    done = mend_keys(place, B)
    assert (done.record, done.kept) == (2, True)
    assert done.deleted == foreseen.deleted == (key_record_key(number),)
    assert _opens(place, A)
    assert _opens(place, B)
    assert keyring.rotate(place, B, C).record == 3
    assert not mend_keys(place, C).deleted


def test_a_copy_of_a_record_without_seal_blocks_nothing(place: MemoryBackend) -> None:
    """Of a store from before seals it opens; the last number there is can be got rid of."""
    data = _before_seals(place)
    place.put(key_record_key(LAST), _renumbered(data, LAST))
    assert _opens(place, A)
    with pytest.raises(LimitError, match="the last number") as caught:
        keyring.rotate(place, A, B)
    assert "ckptstore key mend" in str(caught.value.hint)
    done = mend_keys(place, A)
    assert not done.kept
    assert set(done.deleted) == {key_record_key(1), key_record_key(LAST)}
    assert keyring.record_numbers(place) == [done.record]
    assert keyring.rotate(place, A, B).keys == (B.id,)
    assert _opens(place, B)
    assert not _opens(place, A)


def test_a_rotation_that_was_killed_may_look_the_same(place: MemoryBackend) -> None:
    """Both records are there: the new key opens the store, and the old one is told what it may."""
    old = _read(place, 1)
    keyring.rotate(place, A, B)
    place.put(key_record_key(1), old)
    assert _opens(place, B)
    with pytest.raises(WrongKeyError, match="wants") as caught:
        open_on(place, key=A, prober=_atomic)
    assert "unless somebody has just rotated" in str(caught.value.hint)
    assert mend_keys(place, B).deleted == (key_record_key(1),)


def test_a_key_that_opens_nothing_mends_nothing(place: MemoryBackend) -> None:
    """Nobody takes away what he has no key for; no store, a plain one and lost keys are told."""
    before = _read(place, 1)
    with pytest.raises(WrongKeyError, match="opens none of 1"):
        mend_keys(place, C)
    assert _read(place, 1) == before
    place.put(key_record_key(1), b"")
    with pytest.raises(CorruptObjectError, match="can be read"):
        mend_keys(place, A)
    plain = MemoryBackend("planted-plain")
    with pytest.raises(StoreNotFoundError):
        mend_keys(plain, A)
    create_on(plain, prober=_atomic, exist_ok=True)
    with pytest.raises(EncryptionKeyError, match="is not encrypted"):
        mend_keys(plain, A)


def test_too_many_are_not_looked_at(place: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is bounded, whoever has filled the folder."""
    monkeypatch.setattr(limits, "KEY_RECORDS_MAX", 3)
    for number in range(2, 6):
        place.put(key_record_key(number), b"{}")
    with pytest.raises(LimitError, match="5 records"):
        mend_keys(place, A)


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_mending_that_dies_anywhere_is_done_by_the_next(when: When) -> None:
    """At every call: no record that opens the store is deleted before another one is there."""
    at = 0
    while True:
        at += 1
        backend = MemoryBackend(f"planted-kills-{when}-{at}")
        create_on(backend, key=A, prober=_atomic)
        data = _before_seals(backend)
        for number in (5, LAST):
            backend.put(key_record_key(number), _renumbered(data, number))
        backend.put(key_record_key(LAST - 1), b"{}")
        fault = Fault(at=at, when=when)
        try:
            mend_keys(FaultyBackend(backend, fault), A)
        except StorageError:
            assert mend_keys(backend, A).record in keyring.record_numbers(backend)
        finished = fault.seen < at
        assert len(keyring.record_numbers(backend)) == 1
        assert _opens(backend, A)
        if finished:
            break
    assert at > 5


class _Meanwhile(WrapperBackend):
    """A storage where something else happens just before the first record is deleted."""

    def __init__(self, inner: Backend, work: Callable[[], object]) -> None:
        super().__init__(inner)
        self._work: Callable[[], object] | None = work

    def delete(self, key: str) -> None:
        """Do the other thing, once."""
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
    assert _opens(place, A if first == "mending" else B)


def test_the_seal_is_of_one_store(place: MemoryBackend) -> None:
    """Two stores of one data key would not have one seal: the store's id is part of it."""
    record = decode_key_record(_read(place, 1), where="keys")
    data_key: DataKey = unwrap(record, A, where="keys")
    other: KeyRecord = msgspec.structs.replace(record, store_id="0" * 31 + "1")
    assert data_key.seal_of(other) != data_key.seal_of(record)
