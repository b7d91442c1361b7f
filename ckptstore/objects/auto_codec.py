"""Whether ``codec="auto"`` compresses: what saves of this process took decides, bytes break ties.

A save hashes and encodes in its threads while packs go to the storage. It takes as long as the
slower of the two: compressed, that is mostly the encoder, and on a slow storage the writing of four
fifths of the bytes. So each way has a rate, in bytes of the state a second, and ``auto`` takes the
better one for the whole save: raw has to be clearly faster, since it takes a quarter more room.

A rate is what earlier saves of this store object reached, in this way. Where there was none, it is
reckoned from what the other way showed of the threads and of the storage; and before the first save
from what the backend claims. Nothing here is stored, and nothing depends on it but time and bytes:
the id of a piece is taken before the codec.

Why, and what was measured: docs/design/0015-pipeline.md.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Final

from ckptstore import limits

__all__ = ["Pace", "Rates", "Sample", "Verdict", "verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one save took."""

    planes: bool
    """Whether it compressed."""
    total_bytes: int
    """Of the state."""
    new_bytes: int
    """The part of it that was written."""
    stored_bytes: int
    """What that takes in packs."""
    wall_s: float
    """From the first piece until the last pack was durable."""
    hashing_s: float
    """Of all threads together, as the next."""
    encoding_s: float
    storage_s: float
    """How long at least one thread was writing, or waiting for a pack to become durable."""

    @property
    def tells(self) -> bool:
        """Whether it is long enough to be a measurement, and mostly of pieces that were new."""
        enough = self.new_bytes >= limits.PACE_BYTES_MIN and 2 * self.new_bytes >= self.total_bytes
        return enough and self.wall_s > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What is known, in bytes a second; 0 for what is not."""

    storage: float
    """Durable bytes; a claim until a save was measured."""
    hashing: float = 0.0
    """Of one thread."""
    encoding: float = 0.0
    """Of one thread that hashes and encodes."""
    ratio: float = limits.PACE_RATIO
    """Stored bytes of a compressed save for each of its new bytes."""
    raw: float = 0.0
    """What raw saves reached."""
    planes: float = 0.0
    """What compressed saves reached."""
    raw_age: int = 0
    """Samples of the other way since the last of this one."""
    planes_age: int = 0
    last: bool | None = None
    """Whether the last save that was decided here compressed."""

    def after(self, seen: Sample) -> Rates:
        """Return what is known after one more save; a save that is too short teaches nothing."""
        if not seen.tells:
            return self
        reached = seen.new_bytes / seen.wall_s
        hashing = _rate(seen.total_bytes, seen.hashing_s)
        # The storage was at least so fast. It is no faster than that if it was busy throughout.
        storage = _rate(seen.stored_bytes, min(seen.storage_s, seen.wall_s)) or self.storage
        common = replace(self, storage=storage, hashing=_mean(self.hashing, hashing))
        if not seen.planes:
            return replace(
                common,
                raw=_mean(self.raw, reached),
                raw_age=0,
                planes_age=self.planes_age + 1,
            )
        threads = seen.hashing_s + seen.encoding_s
        return replace(
            common,
            encoding=_mean(self.encoding, _rate(seen.new_bytes, threads)),
            ratio=seen.stored_bytes / seen.new_bytes,
            planes=_mean(self.planes, reached),
            planes_age=0,
            raw_age=self.raw_age + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What ``auto`` does in one save, and why."""

    planes: bool
    raw_bytes_per_s: float
    """Expected of a save that stores chunks as they are, in bytes of the state."""
    planes_bytes_per_s: float
    """Expected of one that compresses."""

    def entries(self) -> dict[str, float]:
        """Return what the receipt of the save says of it."""
        return {
            "auto_planes": float(self.planes),
            "auto_raw_bytes_per_s": self.raw_bytes_per_s,
            "auto_planes_bytes_per_s": self.planes_bytes_per_s,
        }


def verdict(known: Rates, *, workers: int) -> Verdict:
    """Return which way the next save goes; a function of its arguments alone.

    Raw is taken when it is expected to be ``PACE_RAW_GAIN`` times as fast. Once decided, the ratio
    has to pass that line by ``PACE_BAND``, so that what varies from save to save changes nothing.
    """
    hashing = workers * (known.hashing or limits.PACE_HASH_BYTES_PER_S)
    encoding = workers * (known.encoding or limits.PACE_ENCODE_BYTES_PER_S)
    raw = known.raw if known.raw_age < limits.PACE_SAVES else 0.0
    planes = known.planes if known.planes_age < limits.PACE_SAVES else 0.0
    raw = raw or min(hashing, known.storage)
    planes = planes or min(encoding, (known.raw or known.storage) / known.ratio)
    line = limits.PACE_RAW_GAIN
    if known.last is not None:
        line = line * limits.PACE_BAND if known.last else line / limits.PACE_BAND
    return Verdict(planes=raw < line * planes, raw_bytes_per_s=raw, planes_bytes_per_s=planes)


class Pace:
    """What one store object knows of its saves. Any thread may use it.

    Parameters
    ----------
    write_bytes_per_s
        What the backend claims.
    """

    def __init__(self, write_bytes_per_s: float) -> None:
        self._rates = Rates(storage=write_bytes_per_s)
        self._lock = threading.Lock()

    @property
    def rates(self) -> Rates:
        """What is known now."""
        return self._rates

    def choose(self, *, workers: int) -> Verdict:
        """Return which way the next save goes, and remember it."""
        with self._lock:
            found = verdict(self._rates, workers=workers)
            self._rates = replace(self._rates, last=found.planes)
            return found

    def note(self, seen: Sample) -> None:
        """Learn from a save, whoever chose its codec."""
        with self._lock:
            self._rates = self._rates.after(seen)


def _rate(count: int, seconds: float) -> float:
    """Return bytes a second; 0 if that is not known."""
    return count / seconds if seconds > 0.0 else 0.0


_NEWEST: Final = 0.5
"""Weight of the newest save among all. Source: two slow ones in a row are no accident."""


def _mean(old: float, new: float) -> float:
    """Return the moving mean; the new one alone where there was none."""
    if not old or not new:
        return new or old
    return old + _NEWEST * (new - old)
