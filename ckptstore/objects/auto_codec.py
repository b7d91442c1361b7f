"""Choice of ``codec="auto"``: measured rates of this process's saves decide, bytes break ties.

A save hashes and encodes in its threads while packs go to the storage. It takes as long as the
slower of the two: compressed, that is mostly the encoder, and on a slow storage the writing of four
fifths of the bytes. So each way has a rate, in bytes of the state a second, and ``auto`` takes the
better one for the whole save: raw has to be clearly faster, since it takes a quarter more room.

A rate is the median of what the last saves of this store object reached, in this way. Where there
was none, it is reckoned from what the other way showed of the threads and of the storage; and
before the first save from what the backend claims. Equal saves vary, by a factor of two on a busy
machine: so no way is left for a reckoning before it was measured twice, and once both were measured
and compared, only for one that is better by half.

Nothing here is stored, and nothing depends on it but time and bytes: the id of a piece is taken
before the codec.

Why, and what was measured: docs/design/0015-pipeline.md.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, replace
from typing import Final

from ckptstore import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSample:
    """Measurements of one save."""

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
    """Rates measured so far, in bytes a second; 0 for one that is not known."""

    storage: float
    """Durable bytes; a claim until a save was measured."""
    hashing: float = 0.0
    """Of one thread."""
    encoding: float = 0.0
    """Of one thread that hashes and encodes."""
    ratio: float = limits.PACE_RATIO
    """Stored bytes of a compressed save for each of its new bytes."""
    raw: tuple[float, ...] = ()
    """What the last raw saves reached, the newest first."""
    planes: tuple[float, ...] = ()
    """What the last compressed saves reached, the newest first."""
    raw_age: int = 0
    """Samples of the other way since the last of this one."""
    planes_age: int = 0
    last: bool | None = None
    """Whether the last save that was decided here compressed."""
    settled: bool = False
    """That was decided between two ways that were both measured."""

    @property
    def both_measured(self) -> bool:
        """Whether what each way reached is known, and not too old."""
        return bool(self.raw and self.planes) and (
            max(self.raw_age, self.planes_age) < limits.PACE_SAVES
        )

    def after(self, seen: SpeedSample) -> Rates:
        """Return the rates after one more save; a save that is too short teaches nothing."""
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
                raw=_with(reached, self.raw, self.raw_age),
                raw_age=0,
                planes_age=self.planes_age + 1,
            )
        threads = seen.hashing_s + seen.encoding_s
        return replace(
            common,
            encoding=_mean(self.encoding, _rate(seen.new_bytes, threads)),
            ratio=seen.stored_bytes / seen.new_bytes,
            planes=_with(reached, self.planes, self.planes_age),
            planes_age=0,
            raw_age=self.raw_age + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecVerdict:
    """Decision of ``auto`` for one save, and the rates that it follows from."""

    planes: bool
    raw_bytes_per_s: float
    """Expected of a save that stores chunks as they are, in bytes of the state."""
    planes_bytes_per_s: float
    """Expected of one that compresses."""
    measured: bool = False
    """Both were measured; else one was reckoned from the other, or from the backend's claim."""
    kept: bool = False
    """It stays with the way of the last save, though the other is expected to be better."""

    def entries(self) -> dict[str, float]:
        """Return its entries in the receipt of the save."""
        return {f"auto_{name}": float(value) for name, value in asdict(self).items()}


def verdict(known: Rates, *, workers: int) -> CodecVerdict:
    """Return which way the next save goes; a function of its arguments alone.

    Raw is better when it is expected to be ``PACE_RAW_GAIN`` times as fast. The way of the last
    save is kept, though, as long as it was measured less than ``PACE_TRIES`` times and the other
    was not; and where the other is not better by ``PACE_BAND``, or, once both were measured and
    compared, by ``PACE_BAND_SETTLED``.
    """
    hashing = workers * (known.hashing or limits.PACE_HASH_BYTES_PER_S)
    encoding = workers * (known.encoding or limits.PACE_ENCODE_BYTES_PER_S)
    measured = _median(known.raw)
    raw = measured if known.raw_age < limits.PACE_SAVES else 0.0
    planes = _median(known.planes) if known.planes_age < limits.PACE_SAVES else 0.0
    raw = raw or min(hashing, known.storage)
    planes = planes or min(encoding, (measured or known.storage) / known.ratio)
    better = raw < limits.PACE_RAW_GAIN * planes
    chosen = better
    if known.last is not None and better != known.last:
        settled = known.settled and known.both_measured
        band = limits.PACE_BAND_SETTLED if settled else limits.PACE_BAND
        line = limits.PACE_RAW_GAIN * (band if known.last else 1 / band)
        tries = len(known.planes if known.last else known.raw)
        too_soon = not known.both_measured and 0 < tries < limits.PACE_TRIES
        chosen = known.last if too_soon else raw < line * planes
    return CodecVerdict(
        planes=chosen,
        raw_bytes_per_s=raw,
        planes_bytes_per_s=planes,
        measured=known.both_measured,
        kept=chosen != better,
    )


class Pace:
    """Rates of the saves of one store object. Any thread may use it.

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
        """The rates measured so far."""
        return self._rates

    def choose(self, *, workers: int) -> CodecVerdict:
        """Return which way the next save goes, and remember it."""
        with self._lock:
            found = verdict(self._rates, workers=workers)
            self._rates = replace(self._rates, last=found.planes, settled=found.measured)
            return found

    def note(self, seen: SpeedSample) -> None:
        """Learn from a save, also from one whose codec the user chose."""
        with self._lock:
            self._rates = self._rates.after(seen)


def _rate(count: int, seconds: float) -> float:
    """Return bytes a second; 0 if that is not known."""
    return count / seconds if seconds > 0.0 else 0.0


_NEWEST: Final = 0.5
"""Weight of the newest save among all, of what is reckoned with. Source: two slow ones in a row
are no accident."""
_SAMPLES: Final = 3
"""Saves of each way that count. Source: one that something else held up does not show in their
median, and two in a row do."""


def _with(reached: float, known: tuple[float, ...], age: int) -> tuple[float, ...]:
    """Return what is known of a way after one more save; what is too old is forgotten."""
    return (reached, *known)[:_SAMPLES] if age < limits.PACE_SAVES else (reached,)


def _median(rates: tuple[float, ...]) -> float:
    """Return the middle one of some rates, of two the faster; 0 for none."""
    return sorted(rates)[len(rates) // 2] if rates else 0.0


def _mean(old: float, new: float) -> float:
    """Return the moving mean; the new one alone where there was none."""
    if not old or not new:
        return new or old
    return old + _NEWEST * (new - old)
