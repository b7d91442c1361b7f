"""Comparison of what a training was when it was saved with what it is when it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import isclose, isnan
from typing import Final, Literal

import msgspec

from ckptstore.resuming.leaves import GENERATOR

Verdict = Literal["exact", "close", "differs", "unknown"]

_NAMED: Final = 5
_ALIKE: Final = 3
"""Groups of names in a message, and the largest of which all are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """Result of a comparison of a resumed training with the saved one."""

    version: str
    """Label of the version that was resumed."""
    verdict: Verdict
    """``exact``: equal in all that was compared. ``close``: the numbers that the training computes
    differ by no more than the tolerance, and all else is equal. ``unknown``: nothing to compare."""
    steps: int
    """Steps after the save that were compared; if something differs, the first that does, and 0
    for the restored state itself."""
    names: tuple[str, ...] = ()
    """What differs: tensors, generators, counters, the data, the loss; on other ranks than 0
    with ``rank N:`` before it."""

    def __str__(self) -> str:
        """Return a line for people."""
        after = "after 1 step" if self.steps == 1 else f"after {self.steps} steps"
        at = after if self.steps else "in what was restored"
        if self.verdict == "unknown":
            return f"resumed {self.version}: {self.names[0] if self.names else 'not compared'}"
        if self.verdict != "differs":
            return f"resumed {self.version}: {self.verdict} {at}"
        verb = "differs" if len(self.names) == 1 else "differ"
        return f"resumed {self.version}: {_listed(self.names)} {verb} {at}"


def _listed(names: Sequence[str]) -> str:
    """Return names as text; of many that begin alike, the first and their number."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(".")[0], []).append(name)
    told = [
        ", ".join(
            group if len(group) <= _ALIKE else [f"{group[0]} and {len(group) - 1} more of {key}"]
        )
        for key, group in groups.items()
    ]
    more = [f"{len(told) - _NAMED} more"] if len(told) > _NAMED else []
    return ", ".join([*told[:_NAMED], *more])


class Moment(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One rank's training at one moment."""

    entries: dict[str, str]
    """Digests by path."""
    computed: frozenset[str] = frozenset()
    """Paths of floating-point tensors: they follow from what is computed."""
    loss: float | None = None
    gradients: float | None = None
    """Their norm."""


def differences(
    then: Sequence[Moment],
    now: Sequence[Moment],
    tolerance: float,
    ignored: Sequence[AbstractSet[str]],
) -> tuple[list[str], bool]:
    """Return the names of what differs between two moments, and whether numbers are only close.

    What may be the cause of others comes first: data, generators and counters, then loss and
    gradients, then tensors.

    Parameters
    ----------
    then, now
        By rank.
    tolerance
        Relative difference of loss and gradients that counts as close. Where one of them is only
        close, tensors that follow from it are not compared.
    ignored
        Paths that do not matter, by rank.
    """
    names: list[str] = []
    close = False
    for rank, (one, other) in enumerate(zip(then, now, strict=True)):
        computed = one.computed | other.computed
        found = _differing(one.entries, other.entries)
        differing = [name for name in found if name not in ignored[rank]]
        causes = [name for name in differing if name not in computed]
        tensors = [name for name in differing if name in computed]
        numbers = []
        soft = False
        for what, a, b in (
            ("the loss", one.loss, other.loss),
            ("the norm of the gradients", one.gradients, other.gradients),
        ):
            if a is None or b is None or a == b or (isnan(a) and isnan(b)):
                continue
            if isclose(a, b, rel_tol=tolerance):
                soft = True
            else:
                numbers.append(what)
        mine = [*causes, *numbers, *(() if soft and not numbers else tensors)]
        close = close or soft
        names += [f"rank {rank}: {name}" if rank else name for name in mine]
    return names, close


def unused(moments: Sequence[Sequence[Moment]], rank: int) -> frozenset[str]:
    """Return the global generators from which a rank drew nothing in the steps after a save."""
    first = moments[0][rank].entries
    return frozenset(
        name
        for name, digest in first.items()
        if name.startswith(GENERATOR)
        and len(moments) > 1
        and all(one[rank].entries.get(name) == digest for one in moments)
    )


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths of entries that differ, or that only one of both has."""
    for name, digest in then.items():
        if now.get(name) != digest:
            yield name if name in now else f"{name} (missing)"
    yield from (f"{name} (new)" for name in now if name not in then)
