"""Costs of later life: a fork of 1 TB, an ``ls`` from a cold start, collections of old stores.

Requests are counted at the backend, so these figures hold on any machine. The state of 1 TB is only
a manifest: none of its bytes exist, which shows that none are read.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from metered import Meter, MeteredBackend

from benchmarks.disk import Workspace
from benchmarks.measure import Measured, say
from ckptstore import limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.registry import open_backend
from ckptstore.catalog import content_ops, lifecycle_ops, run_ops, snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.run_ops import Save
from ckptstore.catalog.state import Op
from ckptstore.format import manifest as manifests
from ckptstore.format import skeleton
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key, pack_key
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord
from ckptstore.format.pack import CHUNK_HEADER_BYTES, HEADER_BYTES, INDEX_ROW_BYTES, TRAILER_BYTES
from ckptstore.format.skeleton import Node
from ckptstore.hashing import blake3_hex
from ckptstore.repo import Finding, create_on, open_on
from ckptstore.store import Store

__all__ = ["cold_ls", "collections", "commit_manifests", "fork_of_a_terabyte", "terabyte"]

_CHUNK = 4 << 20
_STORED = 3 << 20
_PER_PACK = 32
"""Chunks of a pack in the version of 1 TB."""
_PIECES = 64
"""Of 64 bytes, in each version of the stores that are collected: one pack a version."""
_DELETED = 50
"""Versions that a measured collection finds deleted; as many are saved, so that as many live."""
_BATCH = 500
_numbers = itertools.count()


def _trusting(_backend: Backend, _environment: object) -> Finding:
    return Finding(put_if_absent=PutIfAbsent.ATOMIC, report={})


def _opened(backend: Backend) -> tuple[Store, MeteredBackend]:
    meters = MeteredBackend(backend)
    return Store(open_on(meters, prober=_trusting)), meters


def _asked(before: Mapping[str, Meter], after: Mapping[str, Meter]) -> dict[str, Meter]:
    """Return the use of a backend between two moments, by operation."""
    none = Meter()
    found = {
        name: Meter(
            calls=meter.calls - before.get(name, none).calls,
            bytes_moved=meter.bytes_moved - before.get(name, none).bytes_moved,
            seconds=meter.seconds - before.get(name, none).seconds,
        )
        for name, meter in after.items()
    }
    return {name: meter for name, meter in found.items() if meter.calls}


def _calls(asked: Mapping[str, Meter]) -> dict[str, int]:
    return {name: meter.calls for name, meter in sorted(asked.items())}


# --- a fork of one terabyte -------------------------------------------------------------------


def fork_of_a_terabyte(space: Workspace, *, chunks: int, rounds: int) -> list[Measured]:
    """Time forks of a version of `chunks` chunks of 4 MiB whose packs do not exist.

    Each is made by a newly opened store, so that the manifest is read again. Numbers, of
    the fork alone: ``requests``, ``read_bytes``, ``written_bytes`` and ``backend_s``, the time
    spent in the backend.
    """
    folder = space.fresh()
    version = "ab" * 16
    data = manifests.encode(terabyte(version, chunks))
    with Store(create_on(open_backend(folder), prober=_trusting)) as store:
        commit_manifests(store, "big", {version: data})
    kinds: dict[str, dict[str, Any]] = {
        "fork everything": {},
        "fork the weights": {"roles": ["weights"]},
        "fork and rename": {"include": ["model"], "rename": {"model": "backbone"}},
    }
    measured = [Measured(name=name, logical_bytes=chunks * _CHUNK) for name in kinds]
    for number in range(-1, rounds):
        for one, chosen in zip(measured, kinds.values(), strict=True):
            store, meters = _opened(open_backend(folder))
            with store:
                store.repo.refresh()
                before = meters.snapshot()
                began = time.perf_counter()
                store.fork("big", f"fork-{next(_numbers)}", **chosen)
                seconds = time.perf_counter() - began
                asked = _asked(before, meters.snapshot())
            if number >= 0:
                one.seconds.append(seconds)
                one.numbers = {"manifest_bytes": len(data), **_of_fork(asked)}
    space.discard(folder)
    return measured


def _of_fork(asked: Mapping[str, Meter]) -> dict[str, float]:
    read = ("get", "read_into")
    return {
        "requests": sum(meter.calls for meter in asked.values()),
        "read_bytes": sum(asked[name].bytes_moved for name in read if name in asked),
        "written_bytes": sum(m.bytes_moved for name, m in asked.items() if name not in read),
        "backend_s": sum(meter.seconds for meter in asked.values()),
    }


def terabyte(version: str, chunks: int, *, per_pack: int = _PER_PACK, seed: int = 0) -> Manifest:
    """Return the manifest of a state of up to 2,000 tensors, a third of them weights.

    Its chunks have 4 MiB, and lie in packs that do not exist.
    """
    tensors = min(2000, chunks)
    each = chunks // tensors
    count = each * tensors
    rows = np.arange(count)
    generator = np.random.default_rng(seed)
    table = PieceTable(
        ids=generator.integers(0, 256, (count, 32), dtype=np.uint8),
        raw=np.full(count, _CHUNK, np.uint32),
        pack=(rows // per_pack).astype(np.uint32),
        offset=(HEADER_BYTES + rows % per_pack * (_STORED + CHUNK_HEADER_BYTES)).astype(np.uint64),
        stored=np.full(count, _STORED, np.uint32),
        inner=np.zeros(count, np.uint32),
        slab=np.full(count, _CHUNK, np.uint32),
        packs=[generator.bytes(16).hex() for _ in range(-(-count // per_pack))],
    )
    weights = [place for place in range(tensors) if place % 3 == 0]
    moments = [place for place in range(tensors) if place % 3]
    model: Node = ["d", *_leaves(weights, "layers.{}.weight")]
    optimizer: Node = ["d", *_leaves(moments, "moment.{}")]
    node: Node = ["d", "model", model, "optimizer", optimizer]
    records = tuple(
        TensorRecord(
            dtype="float32",
            shape=(each * 1024, 1024),
            order=None,
            role="optimizer" if place % 3 else "weights",
            nbytes=each * _CHUNK,
        )
        for place in range(tensors)
    )
    return Manifest(
        version=version,
        chunk_bytes=_CHUNK,
        skeleton=skeleton.encode(node),
        tensors=records,
        first=tuple(range(0, count + 1, each)),
        pieces=table,
    )


def _leaves(places: Iterable[int], name: str) -> Iterator[Node]:
    for place in places:
        yield name.format(place)
        yield ["T", place]


# --- ls from a cold start ---------------------------------------------------------------------


def cold_ls(folder: Path) -> dict[str, Any]:
    """Return the requests of a first listing: with the existing tail, then without any.

    Writes the catalog snapshot that removes the tail.
    """
    found: dict[str, Any] = {}
    for state in ("worst", "after a snapshot"):
        store, meters = _opened(open_backend(folder))
        with store:
            catalog = store.repo.refresh()
            next(catalog.versions(newest_first=True))
            found[state] = _calls(meters.snapshot())
            if state == "worst":
                snapshots.write(store.repo.backend, catalog)
    return found


# --- collections of stores with a history -----------------------------------------------------


def collections(histories: Sequence[tuple[int, int]], *, rounds: int) -> list[Measured]:
    """Time a collection for some pairs (versions ever saved, versions alive), in memory.

    Each finds 50 versions deleted since the last one. The seconds are those of the
    collection in an open store; ``open_s`` and ``open_requests`` are the costs of opening.
    """
    measured = []
    for history, live in histories:
        one = Measured(name=f"{history:,} versions, {live:,} alive")
        backend = _old_store(history, live)
        opens: list[float] = []
        for number in range(-1, rounds):
            _turn_over(backend, history + (number + 1) * _DELETED, min(_DELETED, live // 2))
            store, meters = _opened(backend)
            began = time.perf_counter()
            store.repo.refresh()
            opened_s = time.perf_counter() - began
            before = meters.snapshot()
            began = time.perf_counter()
            report = store.gc(grace_s=0, orphan_age_s=0)
            seconds = time.perf_counter() - began
            asked = _asked(before, meters.snapshot())
            if (report.versions_count, report.repacked.packs_count) != (live, 0):
                msg = f"{report.versions_count} live versions, not {live}; or packs written anew"
                raise AssertionError(msg)
            if number >= 0:
                opens.append(opened_s)
                one.seconds.append(seconds)
                one.numbers = {
                    "history": history,
                    "live": live,
                    "listed": sum(kind.count for kind in report.stored.values()),
                    "swept": sum(kind.count for kind in report.swept.values()),
                    "requests": sum(meter.calls for meter in asked.values()),
                    "read_bytes": sum(meter.bytes_moved for meter in asked.values()),
                    "open_requests": sum(meter.calls for meter in before.values()),
                    "open_s": statistics.median(opens),
                }
        measured.append(one)
        say(f"collection: {one.name}")
    return measured


def _old_store(history: int, live: int) -> MemoryBackend:
    """Return a store in which all but the last versions were saved, deleted and collected."""
    backend = MemoryBackend(f"benchmark/{next(_numbers)}")
    with Store(create_on(backend, prober=_trusting)) as store:
        old = [f"{number:032x}" for number in range(history - live)]
        commit_manifests(store, "r", dict.fromkeys(old, b""))
        for ids in _parts(old, limits.VERSIONS_PER_OP_MAX // 4):
            keys = [key(one) for one in ids for key in (manifest_key, pack_key)]
            log = store.repo.log
            log.append(lambda now, ids=ids: lifecycle_ops.delete(now, ids, force=True))  # type: ignore[misc]
            log.append(lambda now, keys=keys: content_ops.condemn(now, keys))  # type: ignore[misc]
            log.append(lambda now, keys=keys: content_ops.swept(now, keys))  # type: ignore[misc]
        _save_small(store, range(history - live, history))
    return backend


def _turn_over(backend: Backend, first: int, count: int) -> None:
    """Delete the oldest versions that are alive, and save as many."""
    with Store(open_on(backend, prober=_trusting)) as store:
        ids = [version.id for version in itertools.islice(store.versions(), count)]
        store.repo.log.append(lambda now: lifecycle_ops.delete(now, ids, force=True))
        _save_small(store, range(first, first + count))


def _save_small(store: Store, numbers: range) -> None:
    """Commit versions of one pack each, which exists as zeros of a real length."""
    made = {}
    pack = bytes(
        HEADER_BYTES + _PIECES * (CHUNK_HEADER_BYTES + 64 + INDEX_ROW_BYTES) + TRAILER_BYTES
    )
    for number in numbers:
        version = f"{number:032x}"
        made[version] = manifests.encode(_small(version))
        store.repo.backend.put(pack_key(version), pack)
    commit_manifests(store, "r", made)


def _small(version: str) -> Manifest:
    rows = np.arange(_PIECES)
    ids = np.zeros((_PIECES, 32), np.uint8)
    ids[:, :16] = np.frombuffer(bytes.fromhex(version), np.uint8)
    ids[:, 31] = rows
    sizes = np.full(_PIECES, 64, np.uint32)
    table = PieceTable(
        ids=ids,
        raw=sizes,
        pack=np.zeros(_PIECES, np.uint32),
        offset=(HEADER_BYTES + rows * (CHUNK_HEADER_BYTES + 64)).astype(np.uint64),
        stored=sizes,
        inner=np.zeros(_PIECES, np.uint32),
        slab=sizes,
        packs=[version],
    )
    record = TensorRecord(
        dtype="float32", shape=(_PIECES, 16), order=None, role="weights", nbytes=64 * _PIECES
    )
    return Manifest(
        version=version,
        chunk_bytes=1 << 16,
        skeleton=skeleton.encode(["T", 0]),
        tensors=(record,),
        first=(0, _PIECES),
        pieces=table,
    )


# --- both -------------------------------------------------------------------------------------


def commit_manifests(store: Store, run: str, made: Mapping[str, bytes]) -> None:
    """Write manifests, except those without bytes, and the commits that name them."""
    for version, data in made.items():
        if data:
            store.repo.backend.put(manifest_key(version), data)
    for part in _parts(list(made), _BATCH):

        def build(now: Catalog, part: Sequence[str] = part) -> Sequence[Op]:
            ops: list[Op] = run_ops.ensure_run(now, run, {})
            parent = now.head_id(run)
            for step, version in enumerate(part, now.versions_count):
                ops.append(_save_op(run, version, parent, step, made[version]))
                parent = version
            return ops

        store.repo.log.append(build)


def _save_op(run: str, version: str, parent: str, step: int, data: bytes) -> Save:
    pointer = ManifestPointer(
        key=manifest_key(version),
        stored_bytes=len(data),
        digest=blake3_hex(data or version.encode()),
    )
    return Save(
        version=version,
        run=run,
        step=step,
        parent=parent,
        manifest=pointer,
        content=blake3_hex(version.encode()),
        metrics={},
        tags=[],
        metadata=msgspec.Raw(b"{}"),
        roles={},
    )


def _parts(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
