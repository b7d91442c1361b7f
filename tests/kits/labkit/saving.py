"""Many writers of one store, and the checks of it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.peers import Call, Peer, PeerError

__all__ = [
    "NUMBERS", "Acked", "Place", "Promises", "assert_kept", "collect", "note", "start_writers",
]  # fmt: skip

# Float32 values of the large tensor: 128 KiB, which makes chunks of its own, and small enough that
# 200 versions take little time.
NUMBERS = 32 * 1024

Acked = dict[str, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of a store."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    def words(self) -> dict[str, Any]:
        """Return the part of a request that names the place."""
        return {"url": self.url, "options": self.options}


@dataclass(slots=True, kw_only=True)
class Promises:
    """Acknowledgements that writers got, and their ends."""

    acked: Acked = field(default_factory=dict)
    """Version id to writer and number, of each save that returned."""
    failed: list[str] = field(default_factory=list)
    """``kind`` of the error that ended a writer."""


def start_writers(
    peer: Peer,
    place: Place,
    writers: Sequence[int],
    *,
    saves: int,
    mark: Sequence[str] = (),
    without_fsync: str = "",
) -> list[Call]:
    """Let several processes save at once.

    Parameters
    ----------
    writers
        Their numbers; no two of a store may be equal.
    saves
        Number of versions that each saves; 0 for ever.
    mark, without_fsync
        See programs/saver.py.

    Every second writer saves to the run ``shared``, the others each to one of their own.
    """
    return [
        peer.send(
            "save", **place.words(), run="shared" if writer % 2 else f"own-{writer}", writer=writer,
            first=0, count=saves, numbers=NUMBERS, mark=list(mark), without_fsync=without_fsync,
        )
        for writer in writers
    ]  # fmt: skip


def collect(calls: Sequence[Call], *, timeout_s: float = 180) -> Promises:
    """Wait for writers to end, in any way, and return their promises."""
    promises = Promises()
    for call in calls:
        try:
            call.result(timeout_s)
        except PeerError as error:
            promises.failed.append(error.kind)
    note(calls, promises)
    return promises


def note(calls: Sequence[Call], promises: Promises) -> None:
    """Add the acknowledgements so far."""
    for call in calls:
        for event in call.heard():
            if event["event"] == "acked":
                promises.acked[event["version"]] = [event["writer"], event["number"]]


def assert_kept(peer: Peer, place: Place, acked: Acked, *, save: bool = True) -> dict[str, Any]:
    """Check that a store keeps every promise, shows nothing torn, and can be saved to again.

    Every visible version is loaded and compared bit by bit with its writer's state; commit
    numbers must have no gap.
    """
    request = {**place.words(), "acked": acked, "save": save}
    found: dict[str, Any] = peer.ask("check", timeout_s=300, **request)
    assert found["problems"] == []
    return found
