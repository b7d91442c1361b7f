"""The manifest and the commit of a version whose parts several ranks wrote. Needs no torch.

Each rank writes packs with its own parts of the state and keeps a :class:`RankPart`: what it wrote,
and where. One of them, which has all parts, puts them together here, and commits what comes of it
(:func:`commit_parts`). A part that is missing is found before the commit.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.checkpoint.content import read_content
from ckptstore.checkpoint.request import WriteRequest, commit_version
from ckptstore.checkpoint.selection import renumbered
from ckptstore.errors import CondemnedError, InvalidInputError, StateError
from ckptstore.format import skeleton
from ckptstore.format.blocks import Blocks, Box, is_row_major, tiling_problem
from ckptstore.format.dtypes import bytes_of
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord
from ckptstore.format.paths import Path, Pattern, path_text
from ckptstore.format.roles import RULE, RoleRules
from ckptstore.format.skeleton import Node, text_node
from ckptstore.model import Version
from ckptstore.objects.piece_writer import Written
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """A box of a tensor that one rank wrote."""

    name: str
    """The tensor's name; the same on every rank."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: tuple[int, int]
    """The first of its pieces in the part's table, and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInfo:
    """A value that is no tensor, or holds some; one rank wrote it whole."""

    name: str
    node: Node
    """Its skeleton; tensors are numbered from 0."""
    records: tuple[tuple[str, tuple[int, ...], tuple[int, ...] | None], ...]
    """Dtype, shape and order of these tensors."""
    rows: tuple[tuple[int, int], ...]
    """Their pieces, as those of a shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """The part that one rank wrote; travels from rank to rank and is never stored."""

    shards: tuple[ShardInfo, ...]
    values: tuple[ValueInfo, ...]
    written: Written
    looked: int
    """The last commit that the rank knew when it looked for what to share, and had written nothing
    yet."""
    seconds: float
    """Wall time of the rank."""


def commit_parts(
    repo: Repo,
    parts: Sequence[RankPart],
    paths: Mapping[str, Path],
    request: WriteRequest,
    *,
    roles: Mapping[Pattern, str],
    receipt: Mapping[str, float] | None = None,
) -> Version:
    """Put the parts together and commit them as a new version; every pack must be durable.

    What a collection condemned since the ranks looked is not written again: the ranks hold
    the bytes, and only they. The save fails as a whole, and the next one shares nothing of it.

    Raises
    ------
    StateError, InvalidInputError
        As :func:`assemble`; or a name, metric or step is refused.
    CondemnedError
        A collection has taken what this save wrote or shared, or may have: this process knows the
        log from a snapshot on that is newer than what a rank looked at.
    StorageError
        The storage failed; no version appeared.
    AmbiguousWriteError
        It is not known whether the version is there.
    """
    environment = repo.environment
    began = environment.monotonic()
    version = environment.random_hex(16)
    _check_known(repo, parts)
    manifest, written = assemble(
        parts, paths, version=version, chunk_bytes=repo.superblock.chunk_bytes, roles=roles
    )
    pointer = repo.manifests.put(manifest, name=version)
    told = {**(receipt or {}), **_receipt(parts, written, manifest)}
    try:
        commit_version(repo, request, manifest, pointer, [written], receipt=told, began=began)
    except CondemnedError as error:
        raised = CondemnedError(
            f"a collection took what this save wrote or shared, while it went on: {error.message}",
            hint="save again; collect with a longer grace, or an age of orphans above a save's",
        )
        raised.keys = error.keys
        raise raised from error
    repo.manifests.keep(pointer.digest, manifest)
    return repo.log.catalog.version(version)


def _check_known(repo: Repo, parts: Sequence[RankPart]) -> None:
    """Raise if something may have been condemned, since a rank looked, that is not known here."""
    if not repo.log.opened:
        repo.refresh()
    looked = min((part.looked for part in parts), default=repo.log.began)
    if looked < repo.log.began:
        began = repo.log.began
        msg = f"a rank looked after commit {looked}; collections up to {began} are not known here"
        raise CondemnedError(msg, hint="save again: nothing was committed")


def _receipt(parts: Sequence[RankPart], written: Written, manifest: Manifest) -> dict[str, float]:
    """Return seconds and counts of all ranks; ``packs_s`` is the slowest rank's."""
    return {
        "packs_s": max(part.seconds for part in parts),
        **written.seconds,
        "pack_bytes": float(written.pack_bytes),
        "packs_count": float(written.packs_count),
        "tensors_count": float(len(manifest.tensors)),
        "ranks_count": float(len(parts)),
    }


def assemble(
    parts: Sequence[RankPart],
    paths: Mapping[str, Path],
    *,
    version: str,
    chunk_bytes: int,
    roles: Mapping[Pattern, str],
) -> tuple[Manifest, Written]:
    """Return the manifest of a version, and what was written, as if by one rank.

    Parameters
    ----------
    paths
        Name of each tensor and value to its place in the state, in the order of the state. Where
        the keys are ints, the container is a list.

    Raises
    ------
    StateError
        Something is in no part, or a tensor's boxes do not tile it, or ranks disagree on what it
        is; names it.
    InvalidInputError
        Two names have places that cannot both be.
    """
    shards: dict[str, list[tuple[int, ShardInfo]]] = {}
    values: dict[str, tuple[int, ValueInfo]] = {}
    for place, part in enumerate(parts):
        for shard in part.shards:
            shards.setdefault(shard.name, []).append((place, shard))
        for value in part.values:
            values.setdefault(value.name, (place, value))
    building = _Building(parts)
    leaves: list[tuple[Path, Node]] = []
    for name, path in paths.items():
        if name in values and name in shards:
            msg = f"{name!r} is a value on one rank and a tensor on another"
            raise StateError(msg, hint="every rank must pass the same state and planner")
        if name in values:
            leaves.append((path, building.value(*values[name])))
        elif name in shards:
            leaves.append((path, building.tensor(name, shards[name])))
        else:
            msg = f"{name!r} was written by no rank"
            raise StateError(msg, hint="every rank must pass the same state and planner")
    return building.finish(nest(leaves), version=version, chunk_bytes=chunk_bytes, roles=roles)


class _Building:
    """The manifest as far as it is, over the rows of all parts, one part after the other."""

    def __init__(self, parts: Sequence[RankPart]) -> None:
        self._written = written = [part.written for part in parts]
        places: dict[str, int] = {}  # a pack that several name is one
        packs: list[npt.NDArray[np.uint32]] = []
        for table in (one.table for one in written):
            own = [places.setdefault(pack, len(places)) for pack in table.packs]
            packs.append(np.array(own, np.uint32)[table.pack] if own else table.pack)
        columns: dict[str, npt.NDArray[Any]] = {
            name: np.concatenate([getattr(one.table, name) for one in written])
            for name in ("ids", "raw", "offset", "stored", "inner", "slab")
        }
        self._table = PieceTable(**columns, pack=np.concatenate(packs), packs=tuple(places))
        self._base = [*itertools.accumulate((len(one.table) for one in written), initial=0)]
        self._records: list[TensorRecord] = []
        self._rows: list[npt.NDArray[np.int64]] = []
        self._first = [0]

    def _add(self, record: TensorRecord, rows: Sequence[tuple[int, tuple[int, int]]]) -> int:
        """Add a tensor whose pieces are some rows of some parts; return its index."""
        count = 0
        for part, (start, stop) in rows:
            base = self._base[part]
            self._rows.append(np.arange(base + start, base + stop, dtype=np.int64))
            count += stop - start
        self._records.append(record)
        self._first.append(self._first[-1] + count)
        return len(self._records) - 1

    def value(self, part: int, value: ValueInfo) -> Node:
        """Add a value; return its node."""
        places: dict[int, int] = {}
        for number, ((dtype, shape, order), rows) in enumerate(
            zip(value.records, value.rows, strict=True)
        ):
            record = TensorRecord(
                dtype=dtype, shape=shape, order=order, role="", nbytes=bytes_of(dtype, shape)
            )
            places[number] = self._add(record, [(part, rows)])
        return renumbered(value.node, places) if places else value.node

    def tensor(self, name: str, shards: Sequence[tuple[int, ShardInfo]]) -> Node:
        """Add a tensor out of its boxes; return its node."""
        one = shards[0][1]
        kinds = {(shard.dtype, shard.shape) for _, shard in shards}
        if len(kinds) > 1:
            said = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in sorted(kinds))
            raise StateError(f"the ranks do not agree on what {name!r} is: {said}")
        boxes: dict[Box, tuple[int, tuple[int, int]]] = {}
        for part, shard in shards:
            if math.prod(shard.sizes):
                boxes.setdefault((shard.offsets, shard.sizes), (part, shard.rows))
        ordered = sorted(boxes)
        blocks = Blocks.of(ordered) if ordered and one.shape else None
        problem = ""
        if blocks is not None:
            problem = tiling_problem(one.shape, blocks)
        elif not ordered and 0 not in one.shape:
            problem = "no rank has any of it"
        if problem:
            msg = f"the parts of {name!r}, of shape {list(one.shape)}: {problem}"
            raise StateError(msg, hint="the ranks must hold all of it, and no element twice")
        if is_row_major(one.shape, ordered):
            blocks = None
        nbytes = bytes_of(one.dtype, one.shape)
        record = TensorRecord(
            dtype=one.dtype, shape=one.shape, order=None, role="", nbytes=nbytes, blocks=blocks
        )
        return ["T", self._add(record, [boxes[box] for box in ordered])]

    def finish(
        self, node: Node, *, version: str, chunk_bytes: int, roles: Mapping[Pattern, str]
    ) -> tuple[Manifest, Written]:
        """Return the manifest, and its rows as one save would have written them."""
        rows = np.concatenate(self._rows) if self._rows else np.zeros(0, np.int64)
        table = self._table.take(rows)
        manifest = Manifest(
            version=version,
            chunk_bytes=chunk_bytes,
            skeleton=skeleton.encode(node),
            tensors=self._with_roles(node, roles),
            first=tuple(self._first),
            pieces=table,
            rule=RULE,
        )
        read_content(manifest)  # what would not load is never written
        seconds: Counter[str] = Counter()
        for one in self._written:
            seconds.update(one.seconds)
        written = Written(
            table=table,
            first=tuple(self._first),
            is_new=np.concatenate([one.is_new for one in self._written])[rows],
            stored_new=np.concatenate([one.stored_new for one in self._written])[rows],
            pack_bytes=sum(one.pack_bytes for one in self._written),
            packs_count=sum(one.packs_count for one in self._written),
            seconds=dict(seconds),
        )
        return manifest, written

    def _with_roles(self, node: Node, roles: Mapping[Pattern, str]) -> tuple[TensorRecord, ...]:
        first: dict[int, Path] = {}
        for leaf in skeleton.iter_leaves(node):
            first.setdefault(leaf.index, leaf.path)
        rules = RoleRules(roles, node=node, records=self._records)
        return tuple(
            record.replace(role=rules(first[index])) for index, record in enumerate(self._records)
        )


# --- skeleton of a state that is only known by the paths of its leaves ----------------------------


def nest(leaves: Sequence[tuple[Path, Node]]) -> Node:
    """Return the skeleton of a state whose leaves have these paths: dicts, and lists for ints."""
    root: dict[Any, Any] = {}
    for path, node in leaves:
        level = root
        for key, below in itertools.pairwise(path):
            level = level.setdefault((type(below) is int, key), {})
        last = (None, path[-1])
        if last in level:
            raise InvalidInputError(f"there are two values at {path_text(path)!r}")
        level[last] = [node]
    return _container(root, is_list=False)


def _container(level: Mapping[Any, Any], *, is_list: bool) -> Node:
    items: dict[Any, Node] = {}
    for (holds_list, key), below in level.items():
        if key in items:
            msg = f"{key!r} is the key of a value and of what holds others, or of two containers"
            raise InvalidInputError(msg)
        items[key] = below[0] if holds_list is None else _container(below, is_list=holds_list)
    if is_list:
        if not all(type(key) is int and 0 <= key < 1 << 24 for key in items):
            raise InvalidInputError(f"a list has the keys {sorted(map(repr, items))[:5]}")
        return ["l", *(items.get(place) for place in range(max(items) + 1))]
    flat: list[Node] = []
    for key, node in items.items():
        flat += [_key(key), node]
    return ["d", *flat]


def _key(key: object) -> Node:
    if not isinstance(key, str):
        raise InvalidInputError(f"{key!r} is no key of a dict here")
    return text_node(key)
