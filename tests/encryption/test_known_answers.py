"""The bytes of the format, made here by cryptography's primitives alone."""

from __future__ import annotations

import struct

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from simulated_environment import SimulatedEnvironment

from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.sealing import DataKey, UserKey, unwrap, wrap
from ckptstore.format.encryption import Encryption, KeyRecord, decode_key_record, encode_key_record

STORE_ID = "0123456789abcdef0123456789abcdef"


def hkdf(material: bytes, salt: bytes, info: bytes, count: int) -> bytes:
    """Return what RFC 5869 says, from HMAC-SHA256 alone; `count` at most 32."""
    extract = HMAC(salt or bytes(32), SHA256())
    extract.update(material)
    expand = HMAC(extract.finalize(), SHA256())
    expand.update(info + b"\x01")
    return expand.finalize()[:count]


def test_derivation_has_known_answers() -> None:
    """What follows from keys of fixed bytes is fixed for good: literals, and RFC 5869 by hand."""
    user, data = bytes(range(32)), bytes(range(32, 64))
    assert UserKey(user).id == hkdf(user, b"", b"ckptstore key id v1", 8).hex()
    assert UserKey(user).id == "f2df2c14f043681a"
    check = hkdf(data, bytes.fromhex(STORE_ID), b"ckptstore key check v1", 16).hex()
    assert DataKey(data).check(STORE_ID) == check == "39bd43a574b825b37190a36435073528"


def sealed_by_hand(data_key: bytes, key: str, salt: bytes, plain: bytes, segment: int) -> bytes:
    """Return an object as docs/reference/format-v1.md says it lies."""
    cipher = AESGCM(hkdf(data_key, salt, b"ckptstore object v1\n" + key.encode(), 32))
    cuts = [plain[at : at + segment] for at in range(0, len(plain), segment)] or [b""]
    sealed = b"CKPTENC1" + salt
    for index, part in enumerate(cuts):
        last = index + 1 == len(cuts)
        number = struct.pack(">IQ", 0, index * 256 + last)
        sealed += cipher.encrypt(number, part, None)
    return sealed


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8192, 10_000])
def test_objects_are_these_bytes(size: int) -> None:
    """An object is what the page says, byte for byte, put whole or written in parts."""
    data_key, key, plain = (
        bytes(range(32, 64)),
        "packs/ab/x.pack",
        bytes(i % 253 for i in range(size)),
    )
    environment = SimulatedEnvironment(7)
    salt = bytes.fromhex(SimulatedEnvironment(7).random_hex(32))
    wanted = sealed_by_hand(data_key, key, salt, plain, 4096)
    memory = MemoryBackend(f"known-answers-{size}")
    backend = EncryptedBackend(
        memory, DataKey(data_key), segment_bytes=4096, environment=environment
    )
    backend.put(key, plain)
    assert memory.objects[key].data == wanted
    memory.objects[key] = memory.objects[key]._replace(data=b"")
    backend = EncryptedBackend(
        memory, DataKey(data_key), segment_bytes=4096, environment=SimulatedEnvironment(7)
    )
    with backend.open_writer(key) as writer:
        for at in range(0, size, 999):
            writer.write(plain[at : at + 999])
        writer.commit()
    assert memory.objects[key].data == wanted
    assert backend.get(key, bytes_max=size) == plain


def test_a_golden_object() -> None:
    """One object, written down: a change of derivation, nonce or layout shows here."""
    sealed = sealed_by_hand(
        bytes(range(32, 64)),
        "commits/000000/000000000001.json",
        bytes(range(64, 96)),
        b"golden",
        65536,
    )
    assert sealed.hex() == (
        "434b5054454e4331"  # CKPTENC1
        "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"  # salt
        "a5ffb0d729146ef29ada9741ae4408b412f8e38ca77a"  # 6 bytes and a tag
    )
    memory = MemoryBackend("golden-object")
    memory.put("commits/000000/000000000001.json", sealed)
    backend = EncryptedBackend(memory, DataKey(bytes(range(32, 64))))
    assert backend.get("commits/000000/000000000001.json", bytes_max=100) == b"golden"


def test_wrapping_by_hand() -> None:
    """A slot is AES-256-GCM of the data key, bound to what the record says, as on the page."""
    user, data, salt = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
    record = KeyRecord(
        number=1,
        store_id=STORE_ID,
        chunk_bytes=4194304,
        created_at_ms=1_700_000_000_000,
        encryption=Encryption(check=DataKey(data).check(STORE_ID)),
        slots=(),
        at_ms=1_700_000_000_000,
        by="golden@example 1",
    )
    slot = wrap(record, DataKey(data), UserKey(user), salt)
    context = "\n".join(
        [
            "ckptstore wrapped key v2",
            STORE_ID,
            "4194304",
            "1700000000000",
            "aes-256-gcm",
            "65536",
            DataKey(data).check(STORE_ID),
            UserKey(user).id,
        ]
    ).encode()
    cipher = AESGCM(hkdf(user, salt, b"ckptstore key wrap v1", 32))
    assert bytes.fromhex(slot.wrapped) == cipher.encrypt(bytes(12), data, context)
    whole = msgspec.structs.replace(record, slots=(slot,))
    text = "\n".join(
        [
            "ckptstore key record v2",
            "1",
            STORE_ID,
            "4194304",
            "1700000000000",
            "aes-256-gcm",
            "65536",
            DataKey(data).check(STORE_ID),
            "1700000000000",
            "1",
            f"{slot.key} {slot.salt} {slot.wrapped} sealed",
            "golden@example 1",
        ]
    ).encode()
    seal = hkdf(data, bytes.fromhex(STORE_ID), text, 32).hex()
    assert DataKey(data).seal_of(whole) == seal
    whole = msgspec.structs.replace(whole, seal=seal)
    again = decode_key_record(encode_key_record(whole), where="keys/1")
    assert again == whole
    assert unwrap(again, UserKey(user), where="keys/1").check(STORE_ID) == record.encryption.check
