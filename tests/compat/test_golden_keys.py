"""Golden stores that are encrypted, which must be read as they are for ever, with their keys."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from goldenkit import FILES, golden

import ckptstore
from ckptstore.errors import MissingKeyError, WrongKeyError

GOLDEN = golden("v1-encrypted")
KEY = bytes(range(32))
FORMER = b"\7" * 31 + b"\1"
SEALED = golden("v1-sealed")
"""The record of keys has a seal; it has a slot for both keys."""


def noise() -> torch.Tensor:
    """Return what was saved as noise."""
    return torch.from_numpy(np.random.default_rng(9).integers(0, 256, 150_000, np.uint8))


def test_the_golden_store_is_read_with_its_key() -> None:
    """Every byte is sound, and every value what it was."""
    with ckptstore.open(GOLDEN, encryption_key=KEY, read_only=True) as store:
        assert store.verify().ok
        first, second = store.load("sealed@1"), store.load("sealed@good")
        assert store.info.features == ("encrypted-v1",)
        assert store.resolve("sealed@2").tags == ("good",)

    assert torch.equal(first["model"]["noise"], noise())
    assert torch.equal(first["model"]["w"], torch.arange(300.0))
    assert torch.equal(second["model"]["w"], torch.arange(300.0) + 1)
    assert torch.equal(second["model"]["noise"], noise())
    assert first["epoch"] == 1


def test_other_keys_do_not_open_the_golden_store() -> None:
    """None, and the one from before the rotation."""
    with pytest.raises(MissingKeyError):
        ckptstore.open(GOLDEN)
    with pytest.raises(WrongKeyError, match="wants f2df2c14f043681a"):
        ckptstore.open(GOLDEN, encryption_key=FORMER)


def _hkdf(material: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(material)


def _opened(data_key: bytes, name: str, data: bytes) -> bytes:
    """Decrypt one object as docs/reference/format-v1.md says."""
    assert data[:8] == b"CKPTENC1"
    cipher = AESGCM(_hkdf(data_key, data[8:40], b"ckptstore object v1\n" + name.encode()))
    parts = [data[at : at + 65_552] for at in range(40, len(data), 65_552)]
    return b"".join(
        cipher.decrypt(struct.pack(">IQ", 0, index << 8 | (index + 1 == len(parts))), part, None)
        for index, part in enumerate(parts)
    )


def _decrypted(folder: Path) -> None:
    """Write the golden store without encryption, by the page and ``cryptography`` alone."""
    record = json.loads((GOLDEN / "keys/000000000002.json").read_bytes())["body"]
    (slot,) = record["slots"]
    told = record["encryption"]
    context = "\n".join(
        (
            "ckptstore wrapped key v1", record["store_id"], str(record["chunk_bytes"]),
            str(record["created_at_ms"]), told["cipher"], str(told["segment_bytes"]), told["check"],
            slot["key"],
        )
    )  # fmt: skip
    wrapping = AESGCM(_hkdf(KEY, bytes.fromhex(slot["salt"]), b"ckptstore key wrap v1"))
    data_key = wrapping.decrypt(bytes(12), bytes.fromhex(slot["wrapped"]), context.encode())
    for name in FILES[GOLDEN.name]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "store.json":
            body = json.loads((GOLDEN / name).read_bytes())["body"]
            del body["encryption"]
            text = json.dumps({**body, "features": []}).encode()
            digest = blake3(text).hexdigest().encode()
            path.write_bytes(b'{"body":%s,"blake3":"%s"}\n' % (text, digest))
        elif not name.startswith("keys/"):
            path.write_bytes(_opened(data_key, name, (GOLDEN / name).read_bytes()))


def test_the_page_is_enough_to_read_it(reader: ModuleType, tmp_path: Path) -> None:
    """Decrypted by the page alone, it is a store that the single-file reader and we both read."""
    _decrypted(tmp_path)
    assert reader.find_save(tmp_path, "sealed")["step"] == 2
    assert (reader.restore(tmp_path, "sealed")["model.noise"] == noise().numpy()).all()
    with ckptstore.open(tmp_path, read_only=True) as store:
        assert store.verify().ok
        assert torch.equal(store.load("sealed@2")["model"]["noise"], noise())


def test_the_single_file_reader_refuses_it(reader: ModuleType) -> None:
    """It has no key, and says what it does not know."""
    with pytest.raises(ValueError, match="encrypted-v1"):
        reader.find_save(GOLDEN, "sealed")


@pytest.mark.parametrize("key", [FORMER, KEY])
def test_both_keys_read_it(key: bytes) -> None:
    """Every byte is sound, and every value what it was."""
    with ckptstore.open(SEALED, encryption_key=key, read_only=True) as store:
        assert store.verify().ok
        assert torch.equal(store.load("sealed@1")["model"]["w"], torch.arange(300.0))


@pytest.mark.parametrize(("place", "key"), [(0, FORMER), (1, KEY)])
def test_the_page_is_enough_to_check_its_record(place: int, key: bytes) -> None:
    """What is wrapped, and the seal, are what docs/reference/format-v1.md says."""
    record = json.loads((SEALED / "keys/000000000002.json").read_bytes())["body"]
    told = record["encryption"]
    fields = [record["store_id"], str(record["chunk_bytes"]), str(record["created_at_ms"])]
    fields += [told["cipher"], str(told["segment_bytes"]), told["check"]]
    slot = record["slots"][place]
    context = "\n".join(["ckptstore wrapped key v2", *fields, slot["key"]]).encode()
    wrapping = AESGCM(_hkdf(key, bytes.fromhex(slot["salt"]), b"ckptstore key wrap v1"))
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
