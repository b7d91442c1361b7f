"""Differences of two versions: by digest from their manifests alone, then by value.

The first needs no tensor: equal ids of pieces are equal bytes. The second reads the tensors that
changed, a window at a time, when it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ckptstore.checkpoint.content import Content
from ckptstore.errors import InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.paths import Path, find_path, path_text
from ckptstore.format.skeleton import MAPS, SEQUENCES, Leaf, Node, decode_key, pairs
from ckptstore.hashing import blake3_of
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.shown import HtmlTable, Shown, bytes_text

if TYPE_CHECKING:
    from ckptstore.states.compare import TensorError

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
    """One leaf in both versions, and how it changed."""

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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiffReport(Shown):
    """The differences of two versions."""

    first: Version
    second: Version
    changes: tuple[TensorChange, ...]
    """Every leaf of both versions, in the order of the second; removed ones at the end."""
    values: tuple[ValueChange, ...]
    _repo: Repo = field(repr=False, compare=False)
    _contents: tuple[Content, Content] = field(repr=False, compare=False)
    _pairs: dict[str, tuple[Leaf, Leaf]] = field(repr=False, compare=False)
    """Leaves that both versions have, by path."""

    def _summary(self) -> HtmlTable:
        counts = Counter(change.status for change in self.changes)
        texts = [*(f"{count} {status}" for status, count in counts.items())]
        texts += [f"{len(self.values)} values differ"] if self.values else []
        rows = [
            *((x.status, x.path, bytes_text((x.after or x.before).nbytes)) for x in self.changes),  # type: ignore[union-attr]  # one of them is there
            *(("value", value.path, f"{value.before} -> {value.after}") for value in self.values),
        ]
        title = f"{self.first.label} -> {self.second.label}: {', '.join(texts) or 'no tensor'}"
        rows.sort(key=lambda row: row[0] == "same")
        return HtmlTable(title=title, columns=("STATUS", "PATH", ""), rows=rows)

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
        By path. None for leaves without values to subtract: bytes, generators.

        Raises
        ------
        TensorNotFoundError
            A path is in neither version.
        InvalidInputError
            A path is not that of a changed tensor of one shape.
        CorruptTensorError, StorageError
            A tensor cannot be read.
        """
        from ckptstore.states.compare import Pair, compare

        comparable = [change.path for change in self.changes if change.is_comparable]
        for path in paths:
            if path not in comparable:
                find_path([(c.path,) for c in self.changes], path)
                raise InvalidInputError(f"{path!r} is not a changed tensor of one shape")
        chosen = dict.fromkeys(paths or comparable)
        pairs = [Pair(first=self._pairs[path][0], second=self._pairs[path][1]) for path in chosen]
        found = compare(self._repo, self._contents, pairs, progress=progress)
        return dict(zip(chosen, found, strict=True))


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
        Gives the content of a version, here or in a replica.

    Raises
    ------
    VersionNotFoundError
        Only the record of one is kept.
    CorruptObjectError
        A manifest is damaged.
    """
    contents = (content_of(first), content_of(second))
    before, after = ({leaf.path: leaf for leaf in content.leaves} for content in contents)
    old, new = map(_digests, contents)
    gone = {path: leaf for path, leaf in before.items() if path not in after}
    by_digest: dict[bytes, list[Path]] = {}
    for path, leaf in gone.items():
        by_digest.setdefault(old(leaf), []).append(path)
    changes: list[TensorChange] = []
    pairs: dict[str, tuple[Leaf, Leaf]] = {}
    for path, leaf in after.items():
        there = before.get(path)
        if there is not None:
            status: Status = "same" if old(there) == new(leaf) else "changed"
            pairs[path_text(path)] = (there, leaf)
        elif candidates := by_digest.get(new(leaf)):
            status, there = "moved", gone.pop(candidates.pop(0))
        else:
            status = "added"
        changes.append(_change(status, contents, there, leaf))
    changes += [_change("removed", contents, leaf, None) for leaf in gone.values()]
    return DiffReport(
        first=first,
        second=second,
        changes=tuple(changes),
        values=tuple(_values(contents[0].node, contents[1].node)),
        _repo=repo,
        _contents=contents,
        _pairs=pairs,
    )


def _digests(content: Content) -> Callable[[Leaf], bytes]:
    """Return a function that gives the digest of a leaf's content: its kind, its pieces' ids."""

    @cache
    def of_record(index: int) -> bytes:
        """Return what is equal for equal values of a tensor."""
        record = content.manifest.tensors[index]
        ids = _ids(content, index).tobytes()
        recipe = record.recipe
        if recipe is not None:  # the same recipe counts, wherever its sources are
            record, ids = record.replace(recipe=None), b"made" + recipe.digest
        return blake3_of([msgspec.msgpack.encode(record.identity), ids])

    return lambda one: blake3_of([of_record(one.index), msgspec.msgpack.encode(_plain(one.node))])


def _ids(content: Content, index: int) -> npt.NDArray[np.uint8]:
    """Return the ids of a tensor's own pieces."""
    first = content.manifest.first
    return content.manifest.pieces.ids[first[index] : first[index + 1]]


_CONTENT: Final = {"T": slice(0), "V": slice(2, 6), "N": slice(2, None), "B": slice(2, None)}
"""Parts of a leaf's node, by its tag, that say more of its content than its tensor does."""


def _plain(node: Node) -> Node:
    """Return a leaf's node without the place and the object that it is loaded to."""
    if not isinstance(node, list):
        return node
    tag = str(node[0])
    if tag in _CONTENT:
        return [tag, *node[_CONTENT[tag]]]
    return [tag, *map(_plain, node[1:])] if tag in ("Q", "G") else node


def _change(
    status: Status, contents: tuple[Content, Content], before: Leaf | None, after: Leaf | None
) -> TensorChange:
    same = _same_bytes(contents, before.index, after.index) if before and after else 0
    old, new = _side(contents[0], before), _side(contents[1], after)
    return TensorChange(status=status, before=old, after=new, same_bytes=same)


def _side(content: Content, leaf: Leaf | None) -> Side | None:
    if leaf is None:
        return None
    record = content.manifest.tensors[leaf.index]
    return Side(
        path=path_text(leaf.path),
        dtype=record.dtype,
        shape=record.shape,
        role=record.role,
        nbytes=record.nbytes,
    )


def _same_bytes(contents: tuple[Content, Content], one: int, two: int) -> int:
    """Return the bytes of pieces that two tensors have at the same place."""
    record = contents[1].manifest.tensors[two]
    recipes = (contents[0].manifest.tensors[one].recipe, record.recipe)
    digests = {None if recipe is None else recipe.digest for recipe in recipes}
    if digests != {None}:  # all of it, or none that could be told
        return record.nbytes if len(digests) == 1 else 0
    first, second = _ids(contents[0], one), _ids(contents[1], two)
    count = min(len(first), len(second))
    equal = (first[:count] == second[:count]).all(axis=1)
    start = contents[1].manifest.first[two]
    return int(contents[1].manifest.pieces.raw[start : start + count][equal].sum())


# --- values that are no tensors -----------------------------------------------------------------

_TENSORS = frozenset({"T", "V", "N", "B", "Q", "G"})


def _values(first: Node, second: Node) -> Iterator[ValueChange]:
    """Yield the values that differ, in the order of the first version."""
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
