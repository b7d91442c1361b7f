"""The golden store whose record of keys has a seal, which must be read as it is for ever."""

from __future__ import annotations

import json

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from goldenkit import golden, sizes

import ckptstore

GOLDEN = golden("v1-sealed")
KEYS = (b"\7" * 31 + b"\1", bytes(range(32)))
FILES = {
    "commits/000000/000000000001.json": 1056,
    "keys/000000000002.json": 911,
    "manifests/ad/ad9d50b50f2d7716c79c3b453caaa0c8.manifest": 399,
    "packs/a4/a4d72d531fa39d55511546f2d6d50760.pack": 1432,
    "store.json": 477,
}


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


@pytest.mark.parametrize("key", KEYS)
def test_both_keys_read_it(key: bytes) -> None:
    """Every byte is sound, and every value what it was."""
    with ckptstore.open(GOLDEN, encryption_key=key, read_only=True) as store:
        assert store.verify().ok
        assert torch.equal(store.load("sealed@1")["model"]["w"], torch.arange(300.0))


def _hkdf(material: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(material)


@pytest.mark.parametrize("place", [0, 1])
def test_the_page_is_enough_to_check_its_record(place: int) -> None:
    """What is wrapped, and the seal, are what docs/reference/format-v1.md says."""
    record = json.loads((GOLDEN / "keys/000000000002.json").read_bytes())["body"]
    told = record["encryption"]
    fields = [record["store_id"], str(record["chunk_bytes"]), str(record["created_at_ms"])]
    fields += [told["cipher"], str(told["segment_bytes"]), told["check"]]
    slot = record["slots"][place]
    context = "\n".join(["ckptstore wrapped key v2", *fields, slot["key"]]).encode()
    wrapping = AESGCM(_hkdf(KEYS[place], bytes.fromhex(slot["salt"]), b"ckptstore key wrap v1"))
    data_key = wrapping.decrypt(bytes(12), bytes.fromhex(slot["wrapped"]), context)
    slots = [f"{one['key']} {one['salt']} {one['wrapped']} sealed" for one in record["slots"]]
    text = "\n".join(
        [
            *("ckptstore key record v2", str(record["number"]), *fields),
            *(str(record["at_ms"]), str(len(slots)), *slots, record["by"]),
        ]
    ).encode()
    seal = _hkdf(data_key, bytes.fromhex(record["store_id"]), text)
    assert seal.hex() == record["seal"]
