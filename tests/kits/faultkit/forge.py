"""Rebuilds a store with false records whose digests are right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import zstandard

from ckptstore.format.framing import encode_envelope
from ckptstore.format.keys import commit_key
from ckptstore.format.pack import CHUNK_HEADER_BYTES, HEADER_BYTES, ChunkHeader, parse_chunk_header
from ckptstore.hashing import blake3_digest, blake3_hex, xxh3_64

__all__ = ["Forge", "frame"]

FRAME_HEADER_BYTES = 64


def frame(magic: bytes, stored: bytes, raw_len: int, *, version: int = 1, flags: int = 0) -> bytes:
    """Return a record frame around bytes, which may be no zstd frame."""
    head = magic + version.to_bytes(2, "little") + flags.to_bytes(2, "little") + bytes(4)
    lengths = raw_len.to_bytes(8, "little") + len(stored).to_bytes(8, "little")
    return head + lengths + blake3_digest(stored) + stored


class Forge:
    """A store as a dict of objects, and the newest version's records as plain values.

    New records are wrapped with correct digests: the version's commit names the new
    manifest, and the later commits the new chain, as an attacker who can write to the storage could
    do.
    """

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = dict(objects)
        self.commits: list[dict[str, Any]] = [
            json.loads(objects[key])["body"] for key in sorted(objects) if key.startswith("commits")
        ]
        self.save = next(
            op
            for body in reversed(self.commits)
            for op in reversed(body["ops"])
            if op["op"] == "save"
        )
        self.manifest_key: str = self.save["manifest"]["key"]
        stored = objects[self.manifest_key][FRAME_HEADER_BYTES:]
        raw = zstandard.ZstdDecompressor().decompress(stored)
        self.manifest: dict[str, Any] = msgspec.msgpack.decode(raw)
        self.skeleton: Any = msgspec.msgpack.decode(self.manifest["skeleton"])
        packs = self.manifest["packs"]
        self.packs = [packs[at : at + 16].hex() for at in range(0, len(packs), 16)]

    def finish(self) -> dict[str, bytes]:
        """Return the objects with manifest, commits and chain rewritten."""
        self.put_manifest(msgspec.msgpack.encode(self.manifest))
        return self.chained()

    def put_skeleton(self, node: Any) -> None:  # noqa: ANN401 - anything that MessagePack holds
        """Put another skeleton into the manifest."""
        self.manifest["skeleton"] = msgspec.msgpack.encode(node)

    def put_manifest(self, raw: bytes) -> None:
        """Put another manifest in place, compressed and framed as it should be."""
        stored = zstandard.ZstdCompressor().compress(raw)
        self.put_object(self.manifest_key, frame(b"CKPTMANI", stored, len(raw)))

    def put_object(self, key: str, data: bytes) -> None:
        """Put a manifest's whole object in place and let the commit point to it."""
        self.objects[key] = data
        self.save["manifest"] = {"key": key, "bytes": len(data), "blake3": blake3_hex(data)}

    def chained(self, bodies: list[bytes] | None = None) -> dict[str, bytes]:
        """Return the objects with all commits rewritten, each naming the one before."""
        previous = ""
        for number, body in enumerate(self.commits, 1):
            body["previous"] = previous
            raw = json.dumps(body, separators=(",", ":")).encode()
            if bodies is not None and number == len(self.commits):
                raw = bodies[0]
            self.objects[commit_key(number)] = encode_envelope(raw)
            previous = blake3_hex(raw)
        return self.objects

    def column(self, name: str) -> list[int]:
        """Return a column of the piece table as numbers."""
        width = 8 if name == "offset" else 4
        data: bytes = self.manifest[name]
        return [
            int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)
        ]

    def put_column(self, name: str, values: list[int]) -> None:
        """Put a column in place."""
        width = 8 if name == "offset" else 4
        self.manifest[name] = b"".join(value.to_bytes(width, "little") for value in values)

    def put_chunk(
        self,
        stored: bytes,
        *,
        codec: int,
        layout: int,
        raw_bytes: int,
        chunk_id: bytes | None = None,
    ) -> None:
        """Place the first piece in a pack of its own, in a chunk with these bytes."""
        piece = self.manifest["ids"][:32]
        header = ChunkHeader(
            codec=codec, layout=layout, raw_bytes=raw_bytes, stored_bytes=len(stored),
            checksum=xxh3_64(stored), chunk_id=piece if chunk_id is None else chunk_id,
        ).to_bytes()  # fmt: skip
        pack = "f0" * 16
        data = b"CKPTPACK\x01\0\0\0\0\0\0\0" + bytes.fromhex(pack) + header + stored
        self.objects[f"packs/{pack[:2]}/{pack}.pack"] = data
        self.manifest["packs"] += bytes.fromhex(pack)
        for name, value in (
            ("pack", len(self.packs)),
            ("offset", HEADER_BYTES),
            ("stored", len(stored)),
            ("slab", raw_bytes),
            ("inner", 0),
        ):
            self.put_column(name, [value, *self.column(name)[1:]])

    def chunk(self, row: int) -> tuple[ChunkHeader, bytes]:
        """Return header and stored bytes of the chunk that holds a piece."""
        pack = self.packs[self.column("pack")[row]]
        data = self.objects[f"packs/{pack[:2]}/{pack}.pack"]
        at = self.column("offset")[row]
        header = parse_chunk_header(data[at : at + CHUNK_HEADER_BYTES], where="forge")
        body = at + CHUNK_HEADER_BYTES
        return header, data[body : body + header.stored_bytes]
