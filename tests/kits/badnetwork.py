"""Faults of networks and servers, one kind after the other."""

from __future__ import annotations

from faultproxy import Fault, Kind

from ckptstore.config import SystemEnvironment

__all__ = ["KINDS", "OFTEN", "SLOW", "Hasty", "hitting", "named"]

KINDS = [
    Fault(kind=Kind.RESET), Fault(kind=Kind.LOST), Fault(kind=Kind.CUT), Fault(kind=Kind.STATUS),
    Fault(kind=Kind.STATUS, status=500, code="InternalError"),
    Fault(kind=Kind.STATUS, status=403, code="AccessDenied"), Fault(kind=Kind.STATUS_AFTER),
    Fault(kind=Kind.STATUS_AFTER, status=500, code="InternalError"),
]  # fmt: skip
OFTEN = [fault for fault in KINDS if fault.status != 403]
"""Faults that a single retry overcomes."""
SLOW = Fault(kind=Kind.DELAY, seconds=2.0)


class Hasty(SystemEnvironment):
    """An environment that never waits."""

    def sleep(self, seconds: float) -> None:
        """Return at once."""


def named(fault: Fault) -> str:
    """Return the test id of a fault."""
    return f"{fault.kind}-{fault.status}"


def hitting(fault: Fault, *, every: int = 1, times: int = 0, skip: int = 0) -> Fault:
    """Return a copy of a fault that hits `times` requests, 0 for all."""
    return Fault(
        kind=fault.kind, status=fault.status, code=fault.code, seconds=fault.seconds, every=every,
        times=times, skip=skip,
    )  # fmt: skip
