"""Saves and loads of one state on an S3 endpoint, by all ways of ``s3_ways``.

The endpoint is that of :mod:`benchmarks.endpoint`; the bucket is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ckptstore
from benchmarks import peers
from benchmarks.disk import Workspace
from benchmarks.endpoint import Bucket, endpoint
from benchmarks.host import header
from benchmarks.measure import FAILURES, Case, Result, run_cases, say
from benchmarks.peers import empty_like, touch
from benchmarks.s3_ways import GETS, PUTS, Way, count_bytes, make_ways
from benchmarks.states import State, StateSpec, make_state, same, state_bytes

__all__ = ["load_cases", "run", "save_cases"]


def run(
    space: Workspace, *, bytes_min: int, rounds: int, training_steps: int = 120
) -> Result | None:
    """Run everything; return the tables ``save`` and ``load``, or None without an endpoint."""
    peers.quiet()
    with endpoint(space) as server:
        if server is None:
            say("s3: no AWS_ENDPOINT_URL, and no Ceph here: left out")
            return None
        bucket = Bucket()
        try:
            return _measure(space, bucket, server, bytes_min, rounds, training_steps)
        finally:
            bucket.remove()


def _measure(
    space: Workspace, bucket: Bucket, server: str, bytes_min: int, rounds: int, training_steps: int
) -> Result:
    spec = StateSpec(bytes_min=bytes_min, training_steps=training_steps)
    head = header(space.root)
    state = make_state(spec)
    result = Result(
        benchmark="s3",
        header=head,
        parameters={
            "state_bytes": state_bytes(state),
            "seed": spec.seed,
            "training_steps": spec.training_steps,
            "rounds": rounds,
            "server": server,
            "puts_at_once": PUTS,
            "gets_at_once": GETS,
        },
    )
    ways = make_ways(bucket.client, state, space.fresh() / "state.pt")
    saves = save_cases(ways, state, bucket)
    result.tables["save"] = run_cases("s3 save", saves, space, rounds=rounds)
    loads = load_cases(ways, state, bucket)
    result.tables["load"] = run_cases("s3 load", loads, space, rounds=rounds)
    return result


# --- tables -----------------------------------------------------------------------------------


def save_cases(ways: Sequence[Way], state: State, bucket: Bucket) -> list[Case]:
    """Return a case for each way to save."""
    return [_save_case(way, state, bucket) for way in ways]


def _save_case(way: Way, state: State, bucket: Bucket) -> Case:
    places: list[str] = []

    def prepare(_: Path) -> None:
        places[:] = [bucket.fresh()]
        if way.name.startswith("ckptstore"):  # the store exists already, as in a training loop
            ckptstore.open(f"s3://{places[0]}", create=True).close()

    def after(_: Path, __: object) -> Mapping[str, float]:
        found = bucket.objects(places[0])
        bucket.clear(places[0])
        return {"stored_bytes": sum(size for _, size in found), "objects": len(found)}

    return Case(
        name=way.name,
        prepare=prepare,
        run=lambda _: way.save(state, places[0]),
        after=after,
        logical_bytes=state_bytes(state),
        note="" if way.name.startswith("ckptstore") else way.note,
    )


def load_cases(ways: Sequence[Way], state: State, bucket: Bucket) -> list[Case]:
    """Save by each way that can; return a case for each way to load its objects."""
    target = empty_like(state)
    cases: list[Case] = []
    for way in ways:
        place = bucket.fresh()
        if way.name.startswith("ckptstore"):
            ckptstore.open(f"s3://{place}", create=True).close()
        try:
            way.save(state, place)
        except FAILURES as error:
            say(f"{way.name} does not save: {error}")
            continue
        if way.plain and way.load is not None:
            cases.append(_load_case(way.name, _taken(way.load, place), state, way))
            continue
        if way.load is not None:
            cases.append(_load_case(f"{way.name}, new", _touched(way.load, place), state, way))
        if way.load_into is not None:
            load = _into(way.load_into, place, target)
            cases.append(_load_case(f"{way.name}, into", load, state, way))
    return cases


def _touched(load: Callable[[str], object], place: str) -> Callable[[Path], object]:
    def timed(_: Path) -> object:
        loaded = load(place)
        touch(loaded)
        return loaded

    return timed


def _taken(load: Callable[[str], object], place: str) -> Callable[[Path], object]:
    return lambda _: load(place)


def _into(
    load: Callable[[str, State], object], place: str, target: State
) -> Callable[[Path], object]:
    return lambda _: load(place, target)


def _load_case(name: str, load: Callable[[Path], object], state: State, way: Way) -> Case:
    checked: list[bool] = []

    def after(_: Path, loaded: Any) -> Mapping[str, float]:  # noqa: ANN401 - whatever was loaded
        if not checked:
            checked.append(True)
            right = count_bytes(loaded) == state_bytes(state) if way.plain else same(state, loaded)
            if not right:
                msg = "what was loaded is not what was saved"
                raise AssertionError(msg)
        return {}

    return Case(
        name=name,
        run=load,
        after=after,
        writes=False,
        logical_bytes=state_bytes(state),
        note=way.note,
    )
