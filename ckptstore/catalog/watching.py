"""What all that watch a metric of a run share: what they ask of the run, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ckptstore.errors import InvalidInputError
from ckptstore.format.fields import Direction
from ckptstore.model import Version

__all__ = ["RunLike", "check", "check_mode", "check_state", "float_or_none", "ref_of", "sign"]


class RunLike(Protocol):
    """What is asked of a run; :class:`ckptstore.Run` is one."""

    name: str

    @property
    def directions(self) -> Mapping[str, Direction]:
        """Which way each metric gets better."""

    def resolve(self, ref: str | int = "latest") -> Version:
        """Return the version that a ref names."""

    def rollback(self, ref: str | int, *, reason: str = "") -> object:
        """Move the head of the run."""


def sign(mode: Direction) -> int:
    """Return 1 where less is better, else -1."""
    return 1 if mode == "min" else -1


def check_mode(mode: str) -> Direction:
    """Return which way is better; raise InvalidInputError for anything else."""
    if mode == "min":
        return "min"
    check(mode == "max", f"mode is 'min' or 'max', not {mode!r}")
    return "max"


def check(condition: object, what: str) -> None:
    """Raise InvalidInputError, with what should hold, unless it does."""
    if not condition:
        raise InvalidInputError(what)


def check_state(state: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    """Raise InvalidInputError unless a ``state_dict`` is of the same metric and mode as another."""
    missing = sorted(like.keys() - state.keys())
    check(not missing, f"the state has no {missing[:1]}: it is not one of these")
    for name in ("monitor", "mode"):
        same = state[name] == like[name]
        check(same, f"the state is of {name} {state[name]!r}, not {like[name]!r}")


def float_or_none(value: object) -> float | None:
    """Return a number of a ``state_dict``, which may be None."""
    return None if value is None else float(value)  # type: ignore[arg-type]  # of a state_dict


def ref_of(run: RunLike | None, version: Version) -> str:
    """Return `run@step` where that names the version, else its id."""
    if run is not None and run.resolve(version.step).id == version.id:
        return f"{version.run}@{version.step}"
    return f"#{version.id}"
