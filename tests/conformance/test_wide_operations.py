"""Every operation that moves bytes has many requests on their way, within ``host_bytes``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import pytest
import torch
from local_servers import Server, start_paced

import ckptstore
from ckptstore import Store
from ckptstore.backends.transfers import Direction
from ckptstore.integrations.safetensors_stream import export_safetensors

pytestmark = pytest.mark.timeout(300)

_MIB: Final = 1 << 20
_SAVES: Final = 12
_PLACE: Final = "s3://bucket/store"
Action = Callable[[Store, Path, Mapping[str, Any]], object]
"""Does an operation on a store; may use a folder, and the options of stores on the server."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start an S3 server."""
    found = start_paced(tmp_path_factory.mktemp("paced"))
    yield found
    found.stop()


def _ask(server: Server, method: str, what: str, data: bytes | None = None) -> dict[str, Any]:
    url = f"{server.url}/-/{what}"
    with urlopen(Request(url, data, method=method)) as answer:  # noqa: S310 - on loopback
        found: dict[str, Any] = json.load(answer)
        return found


def _random(mib: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (mib * _MIB // 8,), generator=made)


@pytest.fixture(scope="module")
def options(server: Server) -> dict[str, Any]:
    """Return the options of stores on the server."""
    return {"endpoint_url": server.url, "key": "a", "secret": "b", "codec": "raw"}


@pytest.fixture(scope="module")
def store(server: Server, options: dict[str, Any]) -> Iterator[Store]:
    """Return a store whose last version lies in 13 packs; earlier ones need most of each.

    From then on the server answers each request after a tenth of a second.
    """
    with ckptstore.open(_PLACE, create=True, chunk_bytes=_MIB, **options) as made:
        state = {}
        for step in range(_SAVES):
            state[f"kept{step}"] = _random(2, step)
            made.run("r").save({**state, "other": _random(4, 100 + step)}, step=step)
        made.run("r").save({**state, "big": _random(24, 200)}, step=_SAVES)
        made.fork("r", "one")
        _ask(server, "PUT", "pace", b'{"latency_s": 0.1}')
        yield made


def _lazy(store: Store, folder: Path, options: Mapping[str, Any]) -> None:
    assert store.version("r")["big"][:].shape == (24 * _MIB // 8,)


def _export(store: Store, folder: Path, options: Mapping[str, Any]) -> None:
    export_safetensors(store, "r", folder / "r.safetensors")


def _replicate(store: Store, folder: Path, options: Mapping[str, Any]) -> None:
    with ckptstore.open("s3://copy/store", create=True, **options) as copy:
        store.replicate(copy, ["r"])
        _check(copy, "replicate", "write", 4)


def _write_back(store: Store, folder: Path, options: Mapping[str, Any]) -> None:
    store.add_replica("behind", "s3://behind/store", create=True, **options)
    store.write_back("behind", runs=["one"])
    store.wait_replicated("one")
    _check(store.replica("behind"), "write-back", "write", 4)


def _collect(store: Store, folder: Path, options: Mapping[str, Any]) -> None:
    """Repack: a third of each pack is needed once the earlier versions are deleted."""
    store.remove([f"r@{step}" for step in range(_SAVES)], force=True)
    assert store.gc(grace_s=0, orphan_age_s=0).repacked.packs_count == _SAVES


def _save(store: Store, folder: Path, options: Mapping[str, Any]) -> None:
    store.run("wide").save({"w": _random(64, 300)}, step=0)


def _check(store: Store, name: str, direction: Direction, least: int) -> None:
    """Compare what the store tells of an operation with what is expected of its width."""
    found = store.transfers()[name][direction]
    assert least <= found.at_once_count <= found.limit_count == 64
    assert found.requests_bytes > least * _MIB
    assert found.requests_s > 0.1


OPERATIONS: Final[list[tuple[str, Action, Direction, int]]] = [
    ("save", _save, "write", 6), ("load", lambda store, *_: store.load("r"), "read", 12),
    ("lazy", _lazy, "read", 10), ("export", _export, "read", 12),
    ("verify", lambda store, *_: store.verify(["r"]), "read", 12),
    ("replicate", _replicate, "read", 12), ("write-back", _write_back, "read", 10),
    ("gc", _collect, "read", 10),
]  # fmt: skip
"""Operation, call, direction, and requests at once that it reaches at least."""


@pytest.mark.slow
def test_a_thaw_asks_for_many_packs_at_once(
    server: Server, options: dict[str, Any], store: Store
) -> None:
    """The state of each pack is a request of its own; no bytes move."""
    with ckptstore.open(_PLACE, **options) as opened:
        _ask(server, "PUT", "pace", b'{"latency_s": 0.1, "hold": {"HEAD": 10}}')
        report = opened.thaw("r", dry_run=True)
        assert _ask(server, "GET", "counts")["at_once"] >= 10
    assert report.packs.count == report.readable.count > _SAVES


@pytest.mark.short("save|load")
@pytest.mark.parametrize(("name", "action", "direction", "least"), OPERATIONS)
def test_an_operation_is_as_wide_as_the_storage_allows(
    server: Server,
    options: dict[str, Any],
    store: Store,
    tmp_path: Path,
    name: str,
    action: Action,
    direction: Direction,
    least: int,
) -> None:
    """The server sees as many requests at once as the store tells; many, of every operation.

    It answers the first request for a pack when as many as expected are on their way.
    """
    writes = least if direction == "write" else 4 if name in {"replicate", "write-back"} else 0
    hold = {"GET": least} if direction == "read" else {}
    hold |= {"PUT": writes} if writes else {}
    with ckptstore.open(_PLACE, **options) as opened:
        _ask(server, "PUT", "pace", json.dumps({"latency_s": 0.1, "hold": hold}).encode())
        action(opened, tmp_path, options)
        seen = _ask(server, "GET", "counts")
        _check(opened, name, direction, least)
        assert seen["at_once"] >= least


def test_refusals_are_counted_and_narrow_the_width(
    server: Server, options: dict[str, Any], store: Store
) -> None:
    """A load of which the server refuses requests succeeds; what was sent again is told."""
    _ask(server, "PUT", "pace", b'{"latency_s": 0.1, "busy_above": 6}')
    try:
        with ckptstore.open(_PLACE, **options) as opened:
            opened.load("r")
            found = opened.transfers()["load"]["read"]
        busy = _ask(server, "GET", "counts")["busy"]
    finally:
        _ask(server, "PUT", "pace", b'{"latency_s": 0.1}')
    assert 0 < found.refused_count <= found.retries_count <= busy
    assert found.requests_count > found.retries_count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["verify", "replicate"])
def test_memory_bounds_the_width(
    options: dict[str, Any], store: Store, tmp_path: Path, name: str
) -> None:
    """Ranges of 2 MiB and their chunks fit into ``host_bytes``, also that of a new target."""
    with ckptstore.open(_PLACE, **options, host_bytes=8 * _MIB) as opened:
        if name == "verify":
            opened.verify(["r"])
        else:
            opened.replicate(tmp_path / "copy", ["r"])
        found = opened.transfers()[name]["read"]
    assert found.at_once_count * 2 * _MIB <= 8 * _MIB
