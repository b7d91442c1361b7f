"""Reference records: the packs that some manifests name, as one object that a collection leaves.

A binary frame (:mod:`ckptstore.format.framing`) around one MessagePack array. A record is a cache:
it repeats what manifests say, which never change, and names them by their digests. It can tell a
collection that there is nothing to do; no object is ever condemned or deleted because of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, LimitError
from ckptstore.format.fields import Count
from ckptstore.format.framing import decode_frame, encode_frame, parsed

MAGIC: Final = b"CKPTREFS"
_DIGEST_BYTES: Final = 32
_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Packs that a set of manifests names."""

    manifests: frozenset[bytes]
    """Digests of the manifests."""
    packs: Mapping[str, int]
    """Id of each pack that one of them names, and the bytes of the chunks that they need of it; at
    least so many, where manifests of several collections name it."""
    deltas_settled: bool
    """No delta of theirs takes less by itself, without its base: a collection has looked."""


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """The record as stored."""

    manifests: Annotated[
        bytes, msgspec.Meta(max_length=_DIGEST_BYTES * limits.SNAPSHOT_VERSIONS_MAX)
    ]
    """Digests, one after another."""
    packs: Annotated[bytes, msgspec.Meta(max_length=_ID_BYTES * limits.PACKS_MAX)]
    """Ids, one after another."""
    live_bytes: Annotated[list[Count], msgspec.Meta(max_length=limits.PACKS_MAX)]
    """Of each pack."""
    deltas_settled: bool


_BODY: Final = msgspec.msgpack.Decoder(_Body)


def encode_references(references: References) -> bytes:
    """Return the object that holds a record.

    Raises
    ------
    LimitError
        If a reader would refuse it for its length.
    """
    packs = sorted(references.packs)
    if len(references.manifests) > limits.SNAPSHOT_VERSIONS_MAX or len(packs) > limits.PACKS_MAX:
        msg = f"a record of {len(references.manifests)} manifests, {len(packs)} packs: too long"
        raise LimitError(msg)
    body = _Body(
        b"".join(sorted(references.manifests)),
        bytes.fromhex("".join(packs)),
        [references.packs[pack] for pack in packs],
        references.deltas_settled,
    )
    return encode_frame(MAGIC, msgspec.msgpack.encode(body))


def decode_references(data: bytes, *, where: str) -> References:
    """Check and parse a record.

    Raises
    ------
    CorruptObjectError
        If the frame, a type, a length or a limit is wrong.
    UnsupportedFeatureError
        If it has a newer format.
    """
    raw = decode_frame(MAGIC, data, where=where, raw_bytes_max=limits.REFERENCES_BYTES_MAX)
    body = parsed(_BODY.decode, raw, f"{where} is not a reference record")
    digests, ids = _cut(body.manifests, _DIGEST_BYTES), _cut(body.packs, _ID_BYTES)
    packs = dict(zip([one.hex() for one in ids], body.live_bytes, strict=False))
    if (
        len(body.manifests) != _DIGEST_BYTES * len(set(digests))
        or len(body.packs) != _ID_BYTES * len(packs)
        or len(packs) != len(body.live_bytes)
    ):
        msg = f"{where} contradicts itself: lengths differ, or an entry is there twice"
        raise CorruptObjectError(msg)
    return References(manifests=frozenset(digests), packs=packs, deltas_settled=body.deltas_settled)


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
