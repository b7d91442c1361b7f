"""Bytes of saves to S3 and of loads from it: their speed, and the processor time that they take.

The server (``slow_s3.c``) gives each connection 10 MB/s and answers 20 ms late, as networks do that
one connection cannot fill; then it has no limit. The bound of a rate is what 64 such connections
give, or what a plain loop moves without the limit on this machine, if that is less. Each save and
each load is a process of its own (:mod:`benchmarks.byte_one`), with the settings of
:mod:`benchmarks.byte_ways`. Without a C compiler the server is the one in Python, whose processor
time is unknown and taken from the same processors.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from paced_s3 import Pace

from benchmarks import peers
from benchmarks.byte_one import ACTIONS, Task, do_task
from benchmarks.byte_ways import WAYS, Way
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say
from benchmarks.paced import Paced, fastest, paced_server
from benchmarks.states import StateSpec, make_state, state_bytes

__all__ = ["UNLIMITED", "WIDTHS", "run"]

WIDTHS: Final = (1, 4, 16, 64, 128)
_WIDE: Final = 64
_WIDE_UNLIMITED: Final = 16
UNLIMITED: Final = ", no limit"
"""End of the names of tables without a limit."""
_RATE: Final = 10e6
_LATENCY_S: Final = 0.02
_PART: Final = 8 << 20
_SHARES: Final = {1: 16, 4: 4}
"""The part of the state, one in so many, that is moved over so few connections."""
_NARROW: Final = 16
"""Likewise, for what uses one connection whatever the width."""
_SPREAD: Final = ("processor_s", "server_s", "locked")
"""Numbers that have a least (``processor_s_low``) and a greatest one of all rounds."""
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
    """Run everything; return ``save`` and ``load`` with a limit and without, and other tables.

    The other tables are ``width``, ``slow`` and ``busy``.

    Parameters
    ----------
    widths
        Numbers of connections of the table ``width``.
    ways
        Names out of :data:`benchmarks.byte_ways.WAYS`.
    bytes_per_s
        Of each connection.
    slow_s
        Delay of one request in a hundred, in the table ``slow``.
    """
    peers.quiet()
    head = header(space.root)
    states = _States(space, StateSpec(bytes_min=bytes_min, training_steps=training_steps))
    clean = Pace(
        bytes_per_s=bytes_per_s, latency_s=_LATENCY_S, ready_bytes=3 * states.total + (256 << 20)
    )
    busy_rate = max(4.0, round(states.total / _PART / 3))
    result = Result(
        benchmark="bytes",
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
    with paced_server(clean, native=True) as server:
        result.parameters["server"] = server.name
        server.pace(Pace())
        plain = fastest(server, states.total, threads=(2, 8, _WIDE_UNLIMITED, _WIDE))
        result.facts["plain"] = plain
        for what, found in plain.items():
            most = max(found.values())
            bounds = result.facts.setdefault("bound", {})
            bounds |= {what: min(_WIDE * bytes_per_s, most), what + UNLIMITED: most}
        bench = _Bench(server, states, result)
        bench.at_width(chosen, clean, rounds)
        bench.at_width(chosen, Pace(), rounds)
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
        self._rounds: dict[str, list[dict[str, float]]] = {}
        """Numbers of each round, by the name of the row."""

    def at_width(self, ways: Sequence[Way], pace: Pace, rounds: int) -> None:
        """Fill a table ``save`` and ``load``: each way as its docs advise for its connections.

        They are 64 with a limit, and 16 without. Numbers are the medians of the rounds.
        """
        rows: dict[tuple[str, str], Measured] = {}
        self._server.pace(pace)
        limited = pace.bytes_per_s > 0
        for number in range(rounds):
            shift = number % len(ways)
            for way in [*ways[shift:], *ways[:shift]]:
                if limited:
                    self._one(rows, way, _wide(way))
                else:
                    actions = _fewest(way)
                    self._one(rows, way, _WIDE_UNLIMITED, actions=actions, narrowed=False)
        for row in rows.values():
            row.numbers = _medians(self._rounds.pop(row.name, []))
        for table in ("save", "load"):
            name = table if limited else table + UNLIMITED
            self._result.tables[name] = [
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
        say(f"bytes: {name}")
        rows: dict[tuple[str, str], Measured] = {}
        for way in ways:
            self._one(rows, way, _wide(way), actions=_fewest(way), paces=(clean, faulty))
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
        narrowed: bool = True,
    ) -> None:
        """Save once and load by all functions of a way; add the numbers to the rows.

        Parameters
        ----------
        paces
            Without a fault and with it: a save that fails with it is done again without, so that
            there is something to load.
        narrowed
            Whether a way moves a part of the state where it uses one connection alone.
        """
        place = f"bench/{next(self._places):04d}"
        for action in _actions(way, actions):
            narrow = narrowed and action.partition(",")[0] in way.narrow
            part = max(share, _NARROW) if narrow else share
            if narrow and action != "save" and "save" not in way.narrow:
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
            say(f"bytes: {way.name} has nothing to load: {error}")

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
        self._rounds.setdefault(row.name, []).append(numbers)
        row.note = f"1/{share} of the state" if share > 1 else ""
        rate = row.logical_bytes / row.seconds[-1] / 1e6
        say(f"bytes: {way.name}, {action}, {width or 'default'}: {rate:.0f} MB/s")


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each number, and the least and the greatest of some."""
    found: dict[str, float] = {}
    for name in rounds[-1] if rounds else ():
        values = [numbers[name] for numbers in rounds if name in numbers]
        found[name] = statistics.median(values)
        if name in _SPREAD:
            found |= {f"{name}_low": min(values), f"{name}_high": max(values)}
    return found


def _wide(way: Way) -> int | None:
    """Return the width to ask for: a store of ckptstore finds its own."""
    return None if way.knob == "requests" else _WIDE


def _fewest(way: Way) -> tuple[str, str]:
    """Return a save and one kind of load, into given memory if the way can."""
    return "save", "load, into" if way.load_into else "load, new"


def _actions(way: Way, wanted: Sequence[str]) -> Iterator[str]:
    having = {"save": way.save, "load, new": way.load, "load, into": way.load_into}
    yield from (action for action in wanted if having[action] is not None)


def _order(item: tuple[tuple[str, str], Measured]) -> tuple[int, int]:
    (name, action), _ = item
    return list(WAYS).index(name), ACTIONS.index(action)
