"""What whoever holds the bucket can change, and that each change is noticed where it can be."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.sealing import DataKey
from ckptstore.cli.main import run as run_program
from ckptstore.format.encryption import decode_key_record, encode_key_record
from ckptstore.format.framing import encode_envelope
from ckptstore.format.segments import HEADER_BYTES, TAG_BYTES
from ckptstore.format.superblock import decode_superblock, encode_superblock
from ckptstore.repo import open_repo

SEGMENT = 4096
STEP = SEGMENT + TAG_BYTES
NAME = "packs/ab/x.pack"


def sealed(size: int = 3 * SEGMENT + 100, key: str = NAME) -> tuple[MemoryBackend, bytes]:
    """Return a memory backend with one encrypted object, and its stored bytes."""
    memory = MemoryBackend(f"attack-{next(_NUMBERS)}")
    EncryptedBackend(memory, DataKey(b"k" * 31 + b"1"), segment_bytes=SEGMENT).put(
        key, bytes(i % 251 for i in range(size))
    )
    return memory, memory.objects[key].data


_NUMBERS = itertools.count()


def refused(memory: MemoryBackend, key: str = NAME, size: int = 3 * SEGMENT + 100) -> None:
    """Check that neither the object nor its range comes back: an error of integrity does."""
    backend = EncryptedBackend(memory, DataKey(b"k" * 31 + b"1"), segment_bytes=SEGMENT)
    with pytest.raises(errors.CorruptObjectError):
        backend.get(key, bytes_max=10 * size)
    with pytest.raises(errors.CorruptObjectError):
        backend.read_into(key, 0, [memoryview(bytearray(size))])


@given(data=st.data())
def test_every_flipped_bit_is_noticed(data: st.DataObject) -> None:
    """Magic, salt, ciphertext, tags: no bit of an object can be changed."""
    memory, raw = sealed()
    place = data.draw(st.integers(0, len(raw) - 1))
    bad = bytearray(raw)
    bad[place] ^= 1 << data.draw(st.integers(0, 7))
    memory.put(NAME, bytes(bad))
    refused(memory)


@given(cut=st.integers(0, 3 * SEGMENT + 100 + HEADER_BYTES + 4 * TAG_BYTES - 1))
def test_every_cut_is_noticed(cut: int) -> None:
    """An object that ends early does not decrypt, wherever it was cut."""
    memory, raw = sealed()
    memory.put(NAME, raw[:cut])
    refused(memory)


@pytest.mark.parametrize("segments", [0, 1, 2, 3])
def test_cuts_at_borders_of_segments_are_noticed(segments: int) -> None:
    """The last segment is sealed as such: no other one can take its place."""
    memory, raw = sealed(4 * SEGMENT)
    memory.put(NAME, raw[: HEADER_BYTES + segments * STEP])
    refused(memory, size=max(1, segments * SEGMENT))


def test_what_is_appended_is_noticed() -> None:
    """Zeros, a segment a second time, the whole object again."""
    memory, raw = sealed(2 * SEGMENT)
    for more in (b"\0", bytes(STEP), raw[HEADER_BYTES : HEADER_BYTES + STEP], raw[-STEP:], raw):
        memory.put(NAME, raw + more)
        backend = EncryptedBackend(memory, DataKey(b"k" * 31 + b"1"), segment_bytes=SEGMENT)
        with pytest.raises(errors.CorruptObjectError):
            backend.get(NAME, bytes_max=10**6)
        size = backend.stat(NAME).size_bytes  # the end of what is listed now
        with pytest.raises(errors.CorruptObjectError):
            backend.read_into(NAME, 0, [memoryview(bytearray(size))])


def test_segments_cannot_change_places() -> None:
    """Within an object, and between two writes of one name."""
    memory, raw = sealed(4 * SEGMENT)
    parts = [raw[HEADER_BYTES + i * STEP : HEADER_BYTES + (i + 1) * STEP] for i in range(4)]
    memory.put(NAME, raw[:HEADER_BYTES] + parts[1] + parts[0] + parts[2] + parts[3])
    refused(memory, size=SEGMENT)
    _, second = sealed(4 * SEGMENT)
    assert second != raw
    memory.put(NAME, raw[: HEADER_BYTES + STEP] + second[HEADER_BYTES + STEP :])
    refused(memory, size=4 * SEGMENT)


def test_an_object_cannot_change_its_name() -> None:
    """Bytes of one object under another's name do not decrypt, nor do those of another store."""
    memory, raw = sealed()
    memory.put("packs/cd/y.pack", raw)
    refused(memory, "packs/cd/y.pack")
    other = EncryptedBackend(
        memory, DataKey(b"another key " * 2 + b"12345678"), segment_bytes=SEGMENT
    )
    with pytest.raises(errors.CorruptObjectError, match="does not decrypt"):
        other.get(NAME, bytes_max=10**6)


def test_a_plain_object_is_not_taken() -> None:
    """An object that was never encrypted is not one of an encrypted store."""
    memory, _ = sealed()
    memory.put(NAME, bytes(4 * SEGMENT))
    refused(memory)


# --- a whole store ------------------------------------------------------------------------------
@pytest.fixture
def place(tmp_path: Path, key: bytes) -> Path:
    """Return an encrypted store with three versions, closed."""
    with ckptstore.open(tmp_path / "s", create=True, encryption_key=key) as store:
        for step in (1, 2, 3):
            store.run("r").save({"x": torch.full((300_000,), float(step))}, step=step)
    return tmp_path / "s"


def test_an_old_commit_under_another_number_is_noticed(place: Path, key: bytes) -> None:
    """The log cannot be put together from commits that were there once: none of them counts."""
    folder = place / "commits" / "000000"
    shutil.copy(folder / "000000000001.json", folder / "000000000003.json")
    with ckptstore.open(place, encryption_key=key) as store:
        runs = store.runs()
        with pytest.raises(errors.CorruptObjectError, match=r"000000000003\.json does not decrypt"):
            store.run(runs[0].name).save({"a": 1}, step=99)


def test_packs_cannot_be_exchanged(place: Path, key: bytes) -> None:
    """One pack's bytes under another's name are damage, and verify says so."""
    one, two, _ = sorted(place.glob("packs/*/*.pack"))
    shutil.copy(one, two)
    with ckptstore.open(place, encryption_key=key) as store:
        (damaged,) = store.verify().damaged_versions
        with pytest.raises(errors.IntegrityError, match="does not decrypt"):
            store.load(f"#{damaged}")


def test_damage_costs_what_it_hits(tmp_path: Path, key: bytes) -> None:
    """A flipped bit in a pack of several chunks costs those of its segment; repair has the rest."""
    with ckptstore.open(
        tmp_path / "s", create=True, encryption_key=key, chunk_bytes=1 << 16
    ) as store:
        state = {f"t{i}": torch.randn(16_384) for i in range(64)}
        store.run("r").save(state, step=1)
        with ckptstore.open(tmp_path / "copy", create=True) as copy:
            store.replicate(copy)
    (pack, *_) = sorted((tmp_path / "s").glob("packs/*/*.pack"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(bytes(data))
    with ckptstore.open(tmp_path / "s", encryption_key=key) as store:
        report = store.verify()
        hit = {problem.tensor for problem in report.problems if problem.tensor}
        assert 1 <= len(hit) <= 3
        with ckptstore.open(tmp_path / "copy", read_only=True) as copy:
            assert store.repair(copy).ok
        assert store.verify().ok
        assert torch.equal(store.load("r@1")["t5"], state["t5"])


def test_rollback_of_the_log_is_not_noticed_by_those_who_know_nothing(
    place: Path, key: bytes
) -> None:
    """What cannot be noticed is said: the newest commits may be withheld from whoever is new."""
    with ckptstore.open(place, encryption_key=key, read_only=True) as knowing:
        assert len(knowing.versions()) == 3
        (place / "commits" / "000000" / "000000000003.json").unlink()
        with ckptstore.open(place, encryption_key=key, read_only=True) as new:
            assert len(new.versions()) == 2


# --- the clear objects --------------------------------------------------------------------------
SUPERBLOCKS: dict[str, tuple[dict[str, object], type[errors.CkptStoreError], str]] = {
    **{
        f"segments of {size}": (
            {"encryption.segment_bytes": size}, errors.CorruptObjectError, "segment_bytes",
        )
        for size in (1 << 62, 4 * limits.MIB + 1, 0, -1, 4095)
    },
    **{
        f"another {field}": ({field: value}, errors.CorruptObjectError, "contradict")
        for field, value in {
            "encryption.segment_bytes": 8192, "encryption.check": "0" * 32, "store_id": "0" * 32,
            "chunk_bytes": 65536,
        }.items()
    },
    "no feature": ({"features": []}, errors.CorruptObjectError, "contradicts itself"),
    "no parameters": ({"encryption": None}, errors.CorruptObjectError, "contradicts itself"),
    "plain": (
        {"features": [], "encryption": None}, errors.EncryptionKeyError,
        "is not encrypted, but a key was given",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUPERBLOCKS)
def test_what_the_superblock_says_is_bound_to_the_key(place: Path, key: bytes, name: str) -> None:
    """Sizes beyond the limits, parameters of others, half a feature: nothing is read or written."""
    changes, error, problem = SUPERBLOCKS[name]
    path = place / "store.json"
    body = json.loads(path.read_bytes())["body"]
    for field, value in changes.items():
        folder, _, leaf = field.rpartition(".")
        (body[folder] if folder else body)[leaf] = value
    kept = {name: value for name, value in body.items() if value is not None}
    path.write_bytes(encode_envelope(json.dumps(kept).encode()))
    with pytest.raises(error, match=problem):
        ckptstore.open(place, encryption_key=key)


@pytest.mark.parametrize("field", ["store_id", "chunk_bytes", "created_at_ms", "encryption"])
def test_both_clear_objects_together_are_bound_to_the_key(
    place: Path, key: bytes, field: str
) -> None:
    """Whoever changes both so that they agree cannot wrap the key anew."""
    where = place / "keys" / "000000000001.json"
    record = decode_key_record(where.read_bytes(), where="keys/1")
    said = decode_superblock((place / "store.json").read_bytes(), where="store.json")
    new = {
        "store_id": "0" * 32,
        "chunk_bytes": 65536,
        "created_at_ms": 5,
        "encryption": msgspec.structs.replace(record.encryption, segment_bytes=8192),
    }[field]
    where.write_bytes(encode_key_record(msgspec.structs.replace(record, **{field: new})))
    (place / "store.json").write_bytes(
        encode_superblock(msgspec.structs.replace(said, **{field: new}))
    )
    with pytest.raises(errors.CorruptObjectError, match="was changed"):
        ckptstore.open(place, encryption_key=key)


def test_damaged_and_hostile_records_of_keys(place: Path, key: bytes, other: bytes) -> None:
    """Every kind of damage is an error with what to do; nothing else was read."""
    where = place / "keys" / "000000000001.json"
    good = where.read_bytes()
    shutil.rmtree(place / "commits")  # whoever read on would find the log gone
    body = json.loads(good)["body"]
    hostile: list[bytes] = [b"", good[:-5], good.replace(b'"number":1', b'"number":2')]
    changes: tuple[dict[str, object], ...] = (
        {"number": 2}, {"slots": []}, {"slots": body["slots"] * 17},
        {"encryption": {**body["encryption"], "segment_bytes": 1 << 40}},
        {"encryption": {**body["encryption"], "cipher": "none"}},
        {"slots": [{**body["slots"][0], "wrapped": "0" * 96}]},
        {"slots": [{**body["slots"][0], "wrapped": "0" * 94}]}, {"magic": "something"},
        {"format": 1}, {"format": 3}, {"format": 1, "seal": ""}, {"seal": "0" * len(body["seal"])},
    )  # fmt: skip
    hostile += [encode_envelope(json.dumps({**body, **change}).encode()) for change in changes]
    for data in hostile:
        where.write_bytes(data)
        with pytest.raises(errors.CkptStoreError) as caught:
            ckptstore.open(place, encryption_key=key)
        assert caught.value.kind in {"corrupt_object", "format", "unsupported_feature"}
    open_slots = [{**slot, "sealed": False} for slot in body["slots"]]
    stripped = {**body, "format": 1, "seal": "", "slots": open_slots}
    where.write_bytes(encode_envelope(json.dumps(stripped).encode()))
    with pytest.raises(
        errors.CorruptObjectError, match="does not open"
    ):  # it belongs to a sealed record
        ckptstore.open(place, encryption_key=key)
    where.write_bytes(bytes(limits.KEY_RECORD_BYTES_MAX + 1))
    with pytest.raises(errors.CorruptObjectError):
        ckptstore.open(place, encryption_key=key)
    where.unlink()
    with pytest.raises(errors.CorruptObjectError, match="no record of its keys"):
        ckptstore.open(place, encryption_key=key)
    where.write_bytes(good)
    with pytest.raises(errors.WrongKeyError):
        ckptstore.open(place, encryption_key=other)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(
    fields=st.dictionaries(
        st.sampled_from(["magic", "format", "number", "store_id", "encryption", "slots", "by"]),
        _JSON,
    ),
    raw=st.binary(max_size=200),
)
def test_records_of_keys_are_hostile_input(fields: dict[str, object], raw: bytes) -> None:
    """Whatever stands below ``keys/``: a record, or an error of ours."""
    for data in (raw, encode_envelope(raw), encode_envelope(json.dumps(fields).encode())):
        with pytest.raises(errors.CkptStoreError):
            decode_key_record(data, where="keys/1")


@pytest.mark.parametrize("empty", [pytest.param("", id="text"), pytest.param(b"", id="bytes")])
def test_an_empty_key_is_not_none(empty: str | bytes, place: Path, tmp_path: Path) -> None:
    """Who gives a key that turns out to be empty never gets a store without encryption."""
    with pytest.raises(errors.EncryptionKeyError):
        ckptstore.open(tmp_path / "new", create=True, encryption_key=empty)
    with pytest.raises(errors.EncryptionKeyError):
        open_repo(str(tmp_path / "new"), create=True, key=empty)
    assert not any(tmp_path.glob("new/*"))
    with ckptstore.open(tmp_path / "plain", create=True) as store:
        with pytest.raises(errors.EncryptionKeyError):
            store.replicate(tmp_path / "new", to_key=empty)
        with pytest.raises(errors.EncryptionKeyError):
            store.add_replica("cold", tmp_path / "new", create=True, encryption_key=empty)
    with pytest.raises(errors.EncryptionKeyError):
        ckptstore.mend_superblock(place, encryption_key=empty)
    assert run_program(["init", str(tmp_path / "new"), "--key", ""]) == 2
    assert not any(tmp_path.glob("new/*"))
