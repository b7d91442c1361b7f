"""The golden store that is encrypted, which must be read as it is for ever, with its key."""

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
from goldenkit import golden, sizes

import ckptstore
from ckptstore.errors import MissingKeyError, WrongKeyError

GOLDEN = golden("v1-encrypted")
KEY = bytes(range(32))
FORMER = b"\7" * 31 + b"\1"
FILES = {
    "commits/000000/000000000001.json": 1092,
    "commits/000000/000000000002.json": 1116,
    "keys/000000000002.json": 599,
    "manifests/47/4722197049bb5b97b9669b446850308d.manifest": 577,
    "manifests/9c/9c3aefd8c0b43fcb81ab41df72de55f7.manifest": 550,
    "packs/28/28df04decca901593b9036e329c19da2.pack": 603,
    "packs/51/517ddceca612129d1f08798ce694aab3.pack": 151_800,
    "store.json": 477,
}


def noise() -> torch.Tensor:
    """Return what was saved as noise."""
    return torch.from_numpy(np.random.default_rng(9).integers(0, 256, 150_000, np.uint8))


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


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
            "ckptstore wrapped key v1",
            record["store_id"],
            str(record["chunk_bytes"]),
            str(record["created_at_ms"]),
            told["cipher"],
            str(told["segment_bytes"]),
            told["check"],
            slot["key"],
        )
    )
    wrapping = AESGCM(_hkdf(KEY, bytes.fromhex(slot["salt"]), b"ckptstore key wrap v1"))
    data_key = wrapping.decrypt(bytes(12), bytes.fromhex(slot["wrapped"]), context.encode())
    for name in FILES:
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
