"""How a write cuts its packs: how large they grow, and how many are in the making at once.

Where a backend takes a pack whole, as object stores do, a pack waits in memory until it is full,
and nothing of it is on its way before. Three things follow, measured in docs/design/0014: the first
packs are small, so that a link has something to do at once; those of a small write stay so; and
enough of them fit into the memory that some can wait to be sent while others are filled, since the
ones that are sent together end together.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore import limits
from ckptstore.backends.base import Capabilities

# A write fills one more pack at once for each of these, and begins with a small one only from here
# on. Source: below, a second pack costs a second fsync and a second request without being any
# faster (measured: docs/design/0003).
_STREAM_BYTES = 32 * limits.MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Sizes and numbers of the packs of one write."""

    streams: int
    """How many are filled at once."""
    at_once: int
    """How many are unfinished at once: filled, sent, or read back."""
    first_bytes: int
    """Where the first pack of a stream is closed; each next one at twice the size."""
    most_bytes: int
    """Where all later ones are closed."""

    def closed_at(self, turn: int) -> int:
        """Return the size at which pack number `turn` of a stream, from 0 on, is closed."""
        return min(self.most_bytes, self.first_bytes << min(turn, 64))


def plan_packs(
    total: int,
    capabilities: Capabilities,
    *,
    threads: int,
    memory_bytes: int,
    chunk_bytes: int = limits.CHUNK_BYTES_DEFAULT,
    beside_bytes: int = 0,
    in_memory: int = limits.PACKS_AT_ONCE,
    whole_bytes: int = 0,
) -> PackPlan:
    """Return how a write goes into packs.

    Parameters
    ----------
    total
        Bytes that the write will take at most.
    threads
        How many fill packs.
    memory_bytes
        What all packs together may hold in host memory. One pack of ``PACK_BYTES_MIN`` is begun
        even if there is less.
    chunk_bytes
        Of the largest chunk: a pack is closed behind the one that fills it.
    beside_bytes
        What is held for a pack that is finished, instead of the pack: while it is read back.
    in_memory
        How many of the largest are to find room in that memory, where packs are collected there.
    whole_bytes
        Of the write of which this is a part, if it is one: the size of its packs goes by that, and
        none is small to be the first, since other parts are on their way already.
    """
    whole = capabilities.pack_bytes
    if capabilities.part_bytes < whole:  # bytes leave before their pack is full
        first = most = whole
        held, unfinished = capabilities.part_bytes, 2 * threads
    else:
        wanted = max(total, whole_bytes) // limits.PACKS_OF_A_WRITE
        fitting = memory_bytes // in_memory - chunk_bytes
        most = min(whole, max(limits.PACK_BYTES_MIN, min(wanted, fitting)))
        overlaps = total >= _STREAM_BYTES and not whole_bytes
        first = min(most, limits.PACK_BYTES_FIRST) if overlaps else most
        held, unfinished = most + chunk_bytes, limits.PACKS_AT_ONCE
    unfinished = max(1, min(unfinished, memory_bytes // max(1, held, beside_bytes)))
    streams = max(1, min(threads, unfinished, total // _STREAM_BYTES))
    return PackPlan(streams=streams, at_once=unfinished, first_bytes=first, most_bytes=most)
