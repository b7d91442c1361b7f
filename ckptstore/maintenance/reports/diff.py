"""What differs between two versions: by digest from their manifests alone, then by value.

The first needs no tensor: equal ids of pieces are equal bytes. The second reads the tensors that
changed, a window at a time, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from ckptstore.checkpoint.content import Content
from ckptstore.errors import InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.paths import Path, find_path, path_text
from ckptstore.format.skeleton import MAPS, SEQUENCES, Leaf, Node, decode_key, pairs
from ckptstore.hashing import blake3_of
from ckptstore.model import Version
from ckptstore.repo import Repo

if TYPE_CHECKING:
    from ckptstore.states.compare import TensorError

__all__ = ["DiffReport", "Side", "TensorChange", "ValueChange", "diff"]

Status = Literal["added", "removed", "moved", "changed", "same"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One leaf of one of the versions."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """What became of one leaf."""

    status: Status
    before: Side | None
    """None if it was added."""
    after: Side | None
    """None if it was removed."""
    same_bytes: int = 0
    """Bytes of it that are in pieces which both versions have at the same place."""

    @property
    def path(self) -> str:
        """Where it is, in the second version if it is there."""
        side = self.after or self.before
        assert side is not None  # noqa: S101  # one of them always is
        return side.path

    @property
    def is_comparable(self) -> bool:
        """Whether it changed, and has one shape in both versions."""
        both = self.before is not None and self.after is not None
        return both and self.status == "changed" and self.before.shape == self.after.shape  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChange:
    """A value that is no tensor (a step, a learning rate), and differs."""

    path: str
    before: str
    """As Python would write it; empty if it was not there."""
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """The differences of two versions."""

    first: Version
    second: Version
    changes: tuple[TensorChange, ...]
    """Every leaf of both versions, in the order of the second; removed ones at the end."""
    values: tuple[ValueChange, ...]
    _source: _Source = field(repr=False, compare=False)

    def of(self, status: Status) -> tuple[TensorChange, ...]:
        """Return the leaves of one status."""
        return tuple(change for change in self.changes if change.status == status)

    @property
    def added(self) -> tuple[TensorChange, ...]:
        """Leaves that only the second version has."""
        return self.of("added")

    @property
    def removed(self) -> tuple[TensorChange, ...]:
        """Leaves that only the first version has."""
        return self.of("removed")

    @property
    def moved(self) -> tuple[TensorChange, ...]:
        """Leaves with one content that have another path."""
        return self.of("moved")

    @property
    def changed(self) -> tuple[TensorChange, ...]:
        """Leaves whose bytes, dtype or shape differ."""
        return self.of("changed")

    @property
    def same(self) -> tuple[TensorChange, ...]:
        """Leaves with the same bytes, dtype and shape."""
        return self.of("same")

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.values and all(change.status == "same" for change in self.changes)

    def errors(
        self, *paths: str, progress: ProgressCallback = silent
    ) -> dict[str, TensorError | None]:
        """Return how far apart changed tensors are: relative L2, largest absolute difference.

        Reads these tensors of both versions, some 64 MB at a time; see
        :func:`ckptstore.states.compare.compare`.

        Parameters
        ----------
        paths
            Changed tensors of one shape in both; all of these, if none is given.

        Returns
        -------
        By path. None for what has no values to subtract: bytes, generators.

        Raises
        ------
        TensorNotFoundError
            A path is in neither version.
        InvalidInputError
            A path is not that of a changed tensor of one shape.
        CorruptTensorError, StorageError
            A tensor cannot be read.
        """
        chosen = {c.path: c for c in self.changes if c.is_comparable}
        for path in paths:
            if path not in chosen:
                find_path([(c.path,) for c in self.changes], path)
                msg = f"{path!r} is not a changed tensor of one shape"
                raise InvalidInputError(msg)
        return self._source.errors(paths or tuple(chosen), progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What a report needs to look closer."""

    repo: Repo
    first: tuple[Version, Content]
    second: tuple[Version, Content]
    leaves: dict[str, tuple[Leaf, Leaf]]

    def errors(
        self, paths: Sequence[str], progress: ProgressCallback
    ) -> dict[str, TensorError | None]:
        """Read the tensors at some paths, and return how far apart each pair is."""
        from ckptstore.states.compare import Pair, compare

        chosen = [Pair(first=self.leaves[p][0], second=self.leaves[p][1]) for p in paths]
        found = compare(self.repo, self.first, self.second, chosen, progress=progress)
        return dict(zip(paths, found, strict=True))


def diff(
    repo: Repo, content_of: Callable[[Version], Content], first: Version, second: Version
) -> DiffReport:
    """Compare two versions of a store by their manifests; reads no tensor.

    Leaves are told apart by their paths. Bytes that were cut into pieces of another size (a
    version that came from a store with another chunk size), or that are stored in another form
    (as themselves, or following from another tensor), look changed although they may not be.

    Parameters
    ----------
    content_of
        Gives what a version holds, from wherever it is.

    Raises
    ------
    VersionNotFoundError
        Only the record of one is kept.
    CorruptObjectError
        A manifest is damaged.
    """
    contents = (content_of(first), content_of(second))
    before, after = ({leaf.path: leaf for leaf in content.leaves} for content in contents)
    prints = tuple(_Prints(content) for content in contents)
    changes: list[TensorChange] = []
    gone = {path: leaf for path, leaf in before.items() if path not in after}
    by_print: dict[bytes, list[Path]] = {}
    for path, leaf in gone.items():
        by_print.setdefault(prints[0].of(leaf), []).append(path)
    shared: dict[str, tuple[Leaf, Leaf]] = {}
    for path, leaf in after.items():
        there = before.get(path)
        if there is None:
            candidates = by_print.get(prints[1].of(leaf), [])
            if candidates:
                there = gone.pop(candidates.pop(0))
                changes.append(_change("moved", contents, there, leaf))
            else:
                changes.append(_change("added", contents, None, leaf))
            continue
        same = prints[0].of(there) == prints[1].of(leaf)
        changes.append(_change("same" if same else "changed", contents, there, leaf))
        shared[path_text(path)] = (there, leaf)
    changes += [_change("removed", contents, leaf, None) for leaf in gone.values()]
    return DiffReport(
        first=first,
        second=second,
        changes=tuple(changes),
        values=tuple(_values(contents[0].node, contents[1].node)),
        _source=_Source(
            repo=repo, first=(first, contents[0]), second=(second, contents[1]), leaves=shared
        ),
    )


class _Prints:
    """Digests of what leaves hold: what they are, and the ids of their pieces."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._records: dict[int, bytes] = {}

    def of(self, leaf: Leaf) -> bytes:
        return blake3_of([self._record(leaf.index), msgspec.msgpack.encode(_plain(leaf.node))])

    def _record(self, index: int) -> bytes:
        if index not in self._records:
            manifest = self._content.manifest
            record = manifest.tensors[index]
            ids = manifest.pieces.ids[manifest.first[index] : manifest.first[index + 1]].tobytes()
            recipe = record.recipe
            if recipe is not None:  # whatever it follows from, wherever that is
                record, ids = replace(record, recipe=None), b"made" + recipe.digest
            what = msgspec.msgpack.encode(record.identity)
            self._records[index] = blake3_of([what, ids])
        return self._records[index]


def _plain(node: Node) -> Node:
    """Return a leaf's node without what says where and as which object it is loaded."""
    if not isinstance(node, list):
        return node
    tag = node[0]
    if tag == "T":
        return ["T"]
    if tag == "V":
        return ["V", *node[2:6]]
    if tag in ("N", "B"):
        return [tag, *node[2:]]
    if tag in ("Q", "G"):
        return [tag, *(_plain(item) for item in node[1:])]
    return node


def _change(
    status: Status, contents: tuple[Content, Content], before: Leaf | None, after: Leaf | None
) -> TensorChange:
    sides = [
        None if leaf is None else _side(content, leaf)
        for content, leaf in zip(contents, (before, after), strict=True)
    ]
    same = 0
    if before is not None and after is not None:
        same = _same_bytes(contents, before.index, after.index)
    return TensorChange(status=status, before=sides[0], after=sides[1], same_bytes=same)


def _side(content: Content, leaf: Leaf) -> Side:
    record = content.manifest.tensors[leaf.index]
    return Side(
        path=path_text(leaf.path),
        dtype=record.dtype,
        shape=record.shape,
        role=record.role,
        nbytes=record.nbytes,
    )


def _same_bytes(contents: tuple[Content, Content], one: int, two: int) -> int:
    records = (contents[0].manifest.tensors[one], contents[1].manifest.tensors[two])
    recipes = [record.recipe for record in records if record.recipe is not None]
    if recipes:  # all of it, or none that could be told
        same = len(recipes) == 2 and recipes[0].digest == recipes[1].digest
        return records[1].nbytes if same else 0
    first, second = (
        content.manifest.pieces.ids[content.manifest.first[i] : content.manifest.first[i + 1]]
        for content, i in zip(contents, (one, two), strict=True)
    )
    count = min(len(first), len(second))
    equal = (first[:count] == second[:count]).all(axis=1)
    start = contents[1].manifest.first[two]
    return int(contents[1].manifest.pieces.raw[start : start + count][equal].sum())


# --- values that are no tensors -----------------------------------------------------------------

_TENSORS = frozenset({"T", "V", "N", "B", "Q", "G"})


def _values(first: Node, second: Node) -> Iterator[ValueChange]:
    before, after = dict(_plain_leaves(first, ())), dict(_plain_leaves(second, ()))
    for path in dict.fromkeys((*before, *after)):
        if path not in before or path not in after or before[path] != after[path]:
            yield ValueChange(
                path=path_text(path),
                before=_shown(before[path]) if path in before else "",
                after=_shown(after[path]) if path in after else "",
            )


def _plain_leaves(node: Node, path: Path) -> Iterator[tuple[Path, bytes]]:
    tag = str(node[0]) if isinstance(node, list) else ""
    if isinstance(node, list) and tag in MAPS:
        for key, value in pairs(node):
            yield from _plain_leaves(value, (*path, decode_key(key)))
    elif isinstance(node, list) and tag in SEQUENCES:
        for place, item in enumerate(node[SEQUENCES[tag] :]):
            yield from _plain_leaves(item, (*path, place))
    elif tag == "x" and isinstance(node, list):
        yield from _plain_leaves(node[2], path)
    elif tag not in _TENSORS:
        yield path, msgspec.msgpack.encode(node)


def _shown(data: bytes) -> str:
    """Return a value as text: plain ones as Python writes them, others by their parts."""
    node = msgspec.msgpack.decode(data)
    if isinstance(node, list):
        return f"{node[0]}({', '.join(map(repr, node[1:]))})"
    return repr(node)
