"""Saves to S3 and loads from it where each connection is slow, and many together are fast.

The server (``tests/kits/paced_s3.py``) gives each connection 10 MB/s and answers 20 ms late, as
networks do that one connection cannot fill. The bound of a rate is what 64 such connections give,
or what a plain loop moves without the limit on this machine, if that is less. Each save and each
load is a process of its own (:mod:`benchmarks.width_one`), with the settings of
:mod:`benchmarks.width_ways`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from paced_s3 import Pace

from benchmarks import peers
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say
from benchmarks.paced import Paced, fastest, paced_server
from benchmarks.states import StateSpec, make_state, state_bytes
from benchmarks.width_one import ACTIONS, Task, do_task
from benchmarks.width_ways import WAYS, Way

__all__ = ["WIDTHS", "run"]

WIDTHS: Final = (1, 4, 16, 64, 128)
_WIDE: Final = 64
_RATE: Final = 10e6
_LATENCY_S: Final = 0.02
_PART: Final = 8 << 20
_SHARES: Final = {1: 16, 4: 4}
"""The part of the state, one in so many, that is moved over so few connections."""
_NARROW: Final = 16
"""Likewise, for loads that use one connection whatever the width."""
_CURVED: Final = (
    "bytes by boto3",
    "bytes by s3fs",
    "bytes by obstore",
    "s3torchconnector",
    "ckptstore raw",
)


def run(
    space: Workspace,
    *,
    bytes_min: int,
    rounds: int,
    training_steps: int = 120,
    widths: Sequence[int] = WIDTHS,
    ways: Sequence[str] = tuple(WAYS),
    bytes_per_s: float = _RATE,
    slow_s: float = 2.0,
) -> Result:
    """Run everything; return the tables ``save``, ``load``, ``width``, ``slow`` and ``busy``.

    Parameters
    ----------
    widths
        Numbers of connections of the table ``width``.
    ways
        Names out of :data:`benchmarks.width_ways.WAYS`.
    bytes_per_s
        Of each connection.
    slow_s
        Delay of one request in a hundred, in the table ``slow``.
    """
    peers.quiet()
    head = header(space.root)
    states = _States(space, StateSpec(bytes_min=bytes_min, training_steps=training_steps))
    clean = Pace(
        bytes_per_s=bytes_per_s, latency_s=_LATENCY_S, ready_bytes=3 * states.total + (64 << 20)
    )
    busy_rate = max(4.0, round(states.total / _PART / 3))
    result = Result(
        benchmark="width",
        header=head,
        parameters={
            "state_bytes": states.total,
            "rounds": rounds,
            "bytes_per_s_of_a_connection": int(bytes_per_s),
            "latency_ms": _LATENCY_S * 1000,
            "slow_requests": f"1 in 100 by {slow_s:g} s",
            "requests_a_second_above_which_503": busy_rate,
        },
    )
    chosen = [WAYS[name] for name in ways]
    with paced_server(clean) as server:
        server.pace(Pace())
        plain = fastest(server, states.total)
        result.facts["plain"] = plain
        result.facts["bound"] = {
            what: min(_WIDE * bytes_per_s, *[max(found.values())]) for what, found in plain.items()
        }
        bench = _Bench(server, states, result)
        bench.at_width(chosen, clean, rounds)
        bench.curve([way for way in chosen if way.name in _CURVED], clean, widths)
        slow = replace(clean, slow_every=100, slow_s=slow_s)
        bench.under(chosen, "slow", clean, slow)
        bench.under(chosen, "busy", clean, replace(clean, busy_rate=busy_rate))
    return result


class _States:
    """The state in files: the whole, and states of a fraction of its size."""

    def __init__(self, space: Workspace, spec: StateSpec) -> None:
        self._folder = space.fresh()
        state = make_state(spec)
        self.total = state_bytes(state)
        for share in (1, *sorted(set(_SHARES.values()))):
            torch.save(_first(state, self.total // share), self._folder / f"{share}.pt")

    def file(self, share: int) -> str:
        """Return the file of the state, or of a state with a fraction of its bytes."""
        return str(self._folder / f"{share}.pt")


def _first(state: dict[str, Any], most: int) -> dict[str, Any]:
    """Return a state with the first layers of the masters and moments, up to a number of bytes."""
    if most >= state_bytes(state):
        return state
    masters: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in state["optimizer"]["master"].items():
        rows = max(1, min(len(tensor), (most - size) * len(tensor) // max(1, tensor.nbytes)))
        if size < most:
            masters[name] = tensor[:rows].clone()
            size += masters[name].nbytes
    return {"model": masters, "step": state["step"]}


class _Bench:
    """Runs the children and keeps their numbers."""

    def __init__(self, server: Paced, states: _States, result: Result) -> None:
        self._server = server
        self._states = states
        self._result = result
        self._places = itertools.count(1)

    def at_width(self, ways: Sequence[Way], pace: Pace, rounds: int) -> None:
        """Fill the tables ``save`` and ``load``: each way as its docs advise for 64 connections."""
        rows: dict[tuple[str, str], Measured] = {}
        self._server.pace(pace)
        for number in range(rounds):
            shift = number % len(ways)
            for way in [*ways[shift:], *ways[:shift]]:
                self._one(rows, way, _wide(way))
        for table in ("save", "load"):
            self._result.tables[table] = [
                row for (_, action), row in sorted(rows.items(), key=_order) if table in action
            ]

    def curve(self, ways: Sequence[Way], pace: Pace, widths: Sequence[int]) -> None:
        """Fill the table ``width``: rows are named by way, action and width."""
        table = self._result.tables["width"] = []
        self._server.pace(pace)
        for way in ways:
            for width in widths if way.knob else ():
                rows: dict[tuple[str, str], Measured] = {}
                self._one(rows, way, width, share=_SHARES.get(width, 1), actions=ACTIONS[:2])
                for row in rows.values():
                    row.numbers["width"] = width
                table += rows.values()

    def under(self, ways: Sequence[Way], name: str, clean: Pace, faulty: Pace) -> None:
        """Fill a table with one save and one load of each way under a fault.

        The rows have the requests of the same without it (``clean_requests``).
        """
        say(f"width: {name}")
        rows: dict[tuple[str, str], Measured] = {}
        for way in ways:
            self._one(rows, way, _wide(way), paces=(clean, faulty))
        without = [row for table in ("save", "load") for row in self._result.tables[table]]
        by_name = {(row.name, "requests" in row.numbers): row for row in without}
        for row in rows.values():
            base = by_name.get((row.name, True))
            if base is not None and base.numbers:
                row.numbers["clean_requests"] = base.numbers["requests"]
                row.numbers["clean_s"] = base.median
        self._result.tables[name] = [row for _, row in sorted(rows.items(), key=_order)]

    def _one(
        self,
        rows: dict[tuple[str, str], Measured],
        way: Way,
        width: int | None,
        *,
        share: int = 1,
        actions: Sequence[str] = ACTIONS,
        paces: tuple[Pace, Pace] | None = None,
    ) -> None:
        """Save once and load by all functions of a way; add the numbers to the rows.

        Parameters
        ----------
        paces
            Without a fault and with it: a save that fails with it is done again without, so that
            there is something to load.
        """
        place = f"bench/{next(self._places):04d}"
        for action in _actions(way, actions):
            part = max(share, _NARROW) if way.narrow and action != "save" else share
            if way.narrow and action != "save":
                self._saved(way, width, f"{place}-part", part, paces)
            where = place if part == share else f"{place}-part"
            row = rows.setdefault((way.name, action), Measured(name=f"{way.name}: {action}"))
            if row.error:
                continue
            if paces is not None:
                self._server.pace(paces[1])
            try:
                self._add(row, way, action, width, where, part)
            except RuntimeError as error:  # a peer that fails is a result of the benchmark
                row.error = str(error)
                if action == "save":
                    self._saved(way, width, where, part, paces)
        self._server.empty()

    def _saved(
        self, way: Way, width: int | None, place: str, share: int, paces: tuple[Pace, Pace] | None
    ) -> None:
        """Save without a fault, and without counting it."""
        if paces is not None:
            self._server.pace(paces[0])
        try:
            self._add(Measured(name=""), way, "save", width, place, share)
        except RuntimeError as error:
            say(f"width: {way.name} has nothing to load: {error}")

    def _add(
        self, row: Measured, way: Way, action: str, width: int | None, place: str, share: int
    ) -> None:
        file = self._states.file(share)
        task = Task(way=way.name, action=action, width=width, state_file=file, place=place)
        numbers = do_task(task, self._server)
        row.seconds.append(numbers.pop("seconds"))
        row.logical_bytes = int(numbers.pop("state_bytes"))
        self._result.facts.setdefault("kinds", {})[row.name] = numbers.pop("kinds")
        row.numbers = numbers
        row.note = f"1/{share} of the state" if share > 1 else ""
        rate = row.logical_bytes / row.seconds[-1] / 1e6
        say(f"width: {way.name}, {action}, {width or 'default'}: {rate:.0f} MB/s")


def _wide(way: Way) -> int | None:
    """Return the width to ask for: ckptstore finds its own."""
    return None if way.name.startswith("ckptstore") else _WIDE


def _actions(way: Way, wanted: Sequence[str]) -> Iterator[str]:
    having = {"save": way.save, "load, new": way.load, "load, into": way.load_into}
    yield from (action for action in wanted if having[action] is not None)


def _order(item: tuple[tuple[str, str], Measured]) -> tuple[int, int]:
    (name, action), _ = item
    return list(WAYS).index(name), ACTIONS.index(action)
