"""When to stop, and when training has gone wrong: usable from any loop, without torch.

Both classes look at one number at a time, say what it means, and name the version to return to when
they are tied to a run. Their state is a dict of plain values: save it with the training's state, so
that a resumed training decides as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from statistics import median
from typing import Any, Final, Literal, Protocol, Self, cast, get_args

from ckptstore.argument_checks import check_between, integer
from ckptstore.catalog.metrics import best
from ckptstore.errors import InvalidInputError, VersionNotFoundError
from ckptstore.format.fields import Direction
from ckptstore.format.names import check_metric_name
from ckptstore.model import Version


class RunLike(Protocol):
    """The part of a run that is used here; :class:`ckptstore.Run` is one."""

    name: str

    @property
    def directions(self) -> Mapping[str, Direction]:
        """Direction in which each metric gets better."""

    def resolve(self, ref: str | int = "latest") -> Version:
        """Return the version that a ref names."""

    def versions(self) -> Sequence[Version]:
        """Return all versions."""

    def rollback(self, ref: str | int, *, reason: str = "") -> object:
        """Move the head of the run."""


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


@dataclass(eq=False, repr=False)
class _Monitor:
    """A metric that is looked at, one value after another, and the run that it is of."""

    monitor: str
    _: KW_ONLY
    mode: str = "min"

    def __post_init__(self) -> None:
        """Check the name and the mode."""
        check_metric_name(self.monitor)
        check(self.mode in get_args(Direction), f"mode is 'min' or 'max', not {self.mode!r}")
        self._run: RunLike | None = None

    @classmethod
    def _tied(cls, run: RunLike, monitor: str, settings: Mapping[str, Any]) -> Self:
        """Return one that is tied to a run; `settings` may hold the mode."""
        mode = settings.get("mode") or run.directions.get(monitor)
        check(mode, f"run {run.name!r} has no direction for {monitor!r}: give mode='min' or 'max'")
        made = cls(monitor, **{**settings, "mode": mode})
        made._run = run
        return made

    def _loss(self, value: float, bound: float) -> float:
        """Return by how much a value is worse than another; negative where it is better."""
        return value - bound if self.mode == "min" else bound - value


MAD_TO_SIGMA: Final = 1.4826
"""The median absolute deviation of normal data times this is its standard deviation. Source: F. R.
Hampel, The influence curve and its role in robust estimation, JASA 69 (1974), 383-393."""


_REMEMBERED: Final[dict[str, Callable[[Any], object]]] = {
    "best_value": float,
    "best_step": int,
    "waited": int,
    "updates_count": int,
    "reason": str,
}
"""The state of an early stopping, by the types of its values; None stays."""


@dataclass(eq=False, repr=False)
class EarlyStopping(_Monitor):
    """Says stop when a metric has not got better for a while, and names the version to return to.

    Not safe to be used by several threads at once.

    Parameters
    ----------
    monitor
        Name of the metric.
    mode
        ``min`` or ``max``: which way it gets better.
    patience
        After so many updates in a row without improvement it says stop; from 1 on.
    min_delta
        By how much a value must be better than the best so far to count as better.
    relative
        `min_delta` is a share of the best value's amount, not an amount.
    warmup
        Updates at the beginning that do not count against the patience.
    target
        Stop as soon as the metric is as good as this.

    Raises
    ------
    InvalidInputError
        An argument is out of its range.
    """

    patience: int = 5
    min_delta: float = 0.0
    relative: bool = False
    warmup: int = 0
    target: float | None = None
    best_value: float | None = field(default=None, init=False)
    """The best value so far; None before the first that is a number."""
    best_step: int | None = field(default=None, init=False)
    """The step of that value."""
    waited: int = field(default=0, init=False)
    """Updates since the last improvement that count against the patience."""
    updates_count: int = field(default=0, init=False)
    reason: str = field(default="", init=False)
    """Why to stop, for people; empty as long as there is no reason."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        self.patience = integer("patience", self.patience)
        self.warmup = integer("warmup", self.warmup, 0)
        check_between("min_delta", self.min_delta, 0)

    @classmethod
    def for_run(cls, run: RunLike, monitor: str, **settings: Any) -> Self:  # noqa: ANN401
        """Return one that is tied to a run: the direction is the run's, and it names versions.

        Raises
        ------
        InvalidInputError
            The run has no direction for the metric, and no `mode` is given.
        """
        return cls._tied(run, monitor, settings)

    @property
    def should_stop(self) -> bool:
        """Whether the last update said stop."""
        return bool(self.reason)

    def update(self, step: int, value: float) -> bool:
        """Take the metric's value at a step; return whether to stop.

        NaN is no improvement. Of equal values the earlier one is the best.
        """
        number = float(value)
        self.updates_count += 1
        self.reason = ""
        if self._is_better(number):
            self.best_value, self.best_step, self.waited = number, int(step), 0
        elif self.updates_count > self.warmup:
            self.waited += 1
        if self.target is not None and self._loss(number, self.target) <= 0:
            self.reason = f"{self.monitor} is {number:.6g}, the target is {self.target:.6g}"
        elif self.waited >= self.patience:
            what = "was no number"
            if self.best_value is not None:
                what = f"was no better than {self.best_value:.6g} at step {self.best_step}"
            self.reason = f"{self.monitor} {what} for {self.waited} updates"
        return self.should_stop

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best_value is None:
            return True
        share = abs(self.best_value) if self.relative and math.isfinite(self.best_value) else 1.0
        gain = self._loss(self.best_value, value)
        return gain > self.min_delta * share if self.min_delta else gain > 0

    def version(self) -> Version:
        """Return the version to return to.

        The one of the best step; where none was saved then, the best one that has the metric; else
        the newest one before the best step, else the head.

        Raises
        ------
        InvalidInputError
            It is not tied to a run.
        VersionNotFoundError
            The run has no version that can be loaded.
        """
        if self._run is None:
            msg = "early stopping is not tied to a run"
            raise InvalidInputError(msg, hint="EarlyStopping.for_run(run, metric)")
        there = [one for one in self._run.versions() if one.level != "record"]
        line = [one for one in there if not one.abandoned]
        step = -1 if self.best_step is None else self.best_step
        before = [one for one in line if one.step <= step]
        newest = sorted(before, key=lambda one: one.step)[-1:] or line[-1:]
        exact = [one for one in there if one.step == step][-1:]
        for found in (*exact, self._best(before), self._best(line), *newest):
            if found is not None:
                return found
        raise VersionNotFoundError(f"run {self._run.name!r} has no version to return to")

    def _best(self, versions: Sequence[Version]) -> Version | None:
        name = self.monitor
        have = ((one, one.step, one.metrics[name]) for one in versions if name in one.metrics)
        return best(have, cast("Direction", self.mode))

    @property
    def ref(self) -> str:
        """The version to return to as a ref, such as ``gpt@1200``; raises as :meth:`version`."""
        version = self.version()
        if self._run is not None and self._run.resolve(version.step).id == version.id:
            return f"{version.run}@{version.step}"
        return f"#{version.id}"

    def state_dict(self) -> dict[str, Any]:
        """Return its state as plain values."""
        return {name: getattr(self, name) for name in ("monitor", "mode", *_REMEMBERED)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what another one did; settings stay as they are.

        Raises
        ------
        InvalidInputError
            It is the state of another metric or mode, or not a state at all.
        """
        check_state(state, self.state_dict())
        for name, kind in _REMEMBERED.items():
            setattr(self, name, None if state[name] is None else kind(state[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The meaning of a value; true if training has gone wrong."""

    kind: Literal["ok", "nan", "spike"]
    """``nan`` is any value that is not finite."""
    step: int
    value: float
    limit: float | None
    """Values beyond this one are spikes; None during the warmup."""
    version: Version | None = None
    """After a rollback: the head from now on. Load it and go on from it."""

    def __bool__(self) -> bool:
        """Return whether training has gone wrong."""
        return self.kind != "ok"


@dataclass(eq=False, repr=False)
class DivergenceGuard(_Monitor):
    """Finds values that are not finite, and spikes; can roll the run back by itself.

    A spike is worse than the median of the last values by more than `factor` times their median
    absolute deviation, made comparable to a standard deviation (``MAD_TO_SIGMA``; Leys et al.
    2013). Data that came before a spike is not skipped: that is up to the training loop.

    Not safe to be used by several threads at once.

    Parameters
    ----------
    monitor
        Name of the metric, for messages and for the direction.
    mode
        Which way it gets better; only values that are worse can be spikes.
    window
        How many of the last values count, from 4 on.
    factor
        How many scales from the median a spike begins.
    scale_min
        Least scale, as a share of the median, for flat curves.
    warmup
        Values before the first that can be a spike.
    patience
        Bad values in a row that are let pass.
    rollback_to
        Ref of the run (``latest``, ``best:val_loss``, ``~2``) to roll back to; None for none. Only
        with :meth:`for_run`.
    rollbacks_max
        After so many rollbacks :attr:`should_stop` is true.

    Raises
    ------
    InvalidInputError
        An argument is out of its range.
    """

    window: int = 50
    factor: float = 6.0
    scale_min: float = 0.001
    warmup: int = 20
    patience: int = 0
    rollback_to: str | None = None
    rollbacks_max: int = 3
    rollbacks_count: int = field(default=0, init=False)
    should_stop: bool = field(default=False, init=False)
    """Training goes wrong again and again; no more rollbacks are made."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        integer("window", self.window, 4)
        check(self.factor > 0 and self.scale_min >= 0, "factor and scale_min are positive numbers")
        for name in ("warmup", "patience", "rollbacks_max"):
            integer(name, getattr(self, name), 0)
        self.warmup = max(self.warmup, 4)
        self._recent: list[tuple[int, float]] = []
        self._seen = 0
        self._bad = 0

    @classmethod
    def for_run(cls, run: RunLike, monitor: str, **settings: Any) -> Self:  # noqa: ANN401
        """Return one that is tied to a run, which `rollback_to` needs.

        A metric whose direction the run has not declared is taken to be better low, as a training
        loss is.
        """
        mode = settings.get("mode") or run.directions.get(monitor, "min")
        return cls._tied(run, monitor, {**settings, "mode": mode})

    def limit(self) -> float | None:
        """Return the value from which on the next one is a spike; None during the warmup."""
        if self._seen < self.warmup or len(self._recent) < min(self.warmup, self.window):
            return None
        values = [value for _, value in self._recent]
        middle = median(values)
        mad = median(abs(value - middle) for value in values)
        scale = max(MAD_TO_SIGMA * mad, self.scale_min * abs(middle))
        return middle + self.factor * (scale if self.mode == "min" else -scale)

    def update(self, step: int, value: float) -> Verdict:
        """Take the value at a step; say what it means, and roll back if that was asked for.

        Raises
        ------
        CkptStoreError
            The rollback failed; the head is where it was.
        """
        number, limit = float(value), self.limit()
        kind: Literal["ok", "nan", "spike"] = "ok"
        if not math.isfinite(number):
            kind = "nan"
        elif limit is not None and self._loss(number, limit) > 0:
            kind = "spike"
        self._bad = self._bad + 1 if kind != "ok" else 0
        if math.isfinite(number):
            self._seen += 1
            self._recent = [*self._recent, (int(step), number)][-self.window :]
        if self._bad <= self.patience:
            kind = "ok"
        verdict = Verdict(kind=kind, step=int(step), value=number, limit=limit)
        return self._rolled_back(verdict) if verdict else verdict

    def _rolled_back(self, verdict: Verdict) -> Verdict:
        self._bad = 0
        if self._run is None or self.rollback_to is None:
            return verdict
        if self.rollbacks_count >= self.rollbacks_max:
            self.should_stop = True
            return verdict
        reason = f"{self.monitor} is {verdict.value:.6g} at step {verdict.step}: {verdict.kind}"
        self._run.rollback(self.rollback_to, reason=reason)
        version = self._run.resolve("latest")
        self.rollbacks_count += 1
        self._recent = [pair for pair in self._recent if pair[0] <= version.step]
        return replace(verdict, version=version)

    def state_dict(self) -> dict[str, Any]:
        """Return its state as plain values."""
        return {
            "monitor": self.monitor,
            "mode": self.mode,
            "recent": [[step, value] for step, value in self._recent],
            "seen": self._seen,
            "bad": self._bad,
            "rollbacks_count": self.rollbacks_count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what another one did; settings stay as they are.

        Rollbacks that this one made still count.

        Raises
        ------
        InvalidInputError
            It is the state of another metric or mode, or not a state at all.
        """
        check_state(state, self.state_dict())
        recent = [(int(step), float(value)) for step, value in state["recent"]]
        self._recent = recent[-self.window :]
        self._seen = int(state["seen"])
        self._bad = int(state["bad"])
        self.rollbacks_count = max(self.rollbacks_count, int(state["rollbacks_count"]))
