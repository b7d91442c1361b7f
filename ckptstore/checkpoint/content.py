"""The content of a version by its manifest: leaves and tensors; needs no torch and no data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ckptstore.backends.base import Backend
from ckptstore.collector_pause import collector_paused
from ckptstore.config import Options
from ckptstore.encodings.encoding import DERIVED, LOSSLESS, form_name
from ckptstore.errors import CkptStoreError, CorruptObjectError
from ckptstore.events import ProgressCallback
from ckptstore.format import skeleton
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.paths import Path, Pattern, path_text
from ckptstore.format.roles import Judgement, RoleRules
from ckptstore.format.skeleton import Leaf, Node
from ckptstore.format.skeleton_check import validate
from ckptstore.hashing import blake3_of
from ckptstore.objects.plan import ReadItem


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a version."""

    path: str
    """Its first path, with dots between the keys."""
    aliases: tuple[str, ...]
    """Further paths that share its memory: tied tensors and views."""
    kind: str
    """``tensor``, ``parameter``, ``buffer``, ``view``, ``quantized``, ``numpy``, ``bytes`` or
    ``generator``."""
    dtype: str
    """torch's name without ``torch.``"""
    shape: tuple[int, ...]
    role: str
    nbytes: int
    """Bytes in memory."""
    pieces: int
    """How many pieces it is read from; 0 for an empty tensor."""
    encoding: str = LOSSLESS
    """How it is stored: ``lossless``, ``derived``, or a lossy form such as ``int8``."""
    derived_from: str = ""
    """Path of the tensor that it is, converted; of a derived one."""
    coded_bytes: int = 0
    """What is stored of it, before compression: `nbytes` if lossless, 0 if derived."""
    max_abs: float = 0.0
    """Largest difference of an element to what was saved, over the finite ones."""
    rel_l2: float = 0.0
    """Root of the sum of squared differences, over that of the squares of what was saved."""
    max_abs_bound: float | None = None
    """What was allowed when it was saved; None for anything."""
    rel_l2_bound: float | None = None


class ReadPieces(Protocol):
    """Reader of pieces with the signature of :func:`ckptstore.objects.piece_reader.read_pieces`."""

    def __call__(
        self,
        table: PieceTable,
        items: Sequence[ReadItem],
        *,
        backend: Backend,
        options: Options,
        progress: ProgressCallback,
    ) -> None:
        """Fetch, check and decode pieces into their destinations."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """A manifest, understood."""

    manifest: Manifest
    node: Node
    """The skeleton, validated."""
    leaves: tuple[Leaf, ...]
    """In the order of the state."""
    labels: tuple[str, ...]
    """Per tensor record: the path that errors name it by."""
    hidden: frozenset[int] = frozenset()
    """Records that no leaf names: tensors follow from them (:mod:`ckptstore.format.tables`)."""
    read: ReadPieces | None = None
    """How its pieces are had, where the packs of the store alone may not do."""

    @functools.cached_property
    def leaf_at(self) -> dict[Path, Leaf]:
        """Leaves by their path."""
        return {leaf.path: leaf for leaf in self.leaves}

    @functools.cached_property
    def path_of(self) -> dict[str, Path | None]:
        """Paths of leaves by their text; None where several have it."""
        found: dict[str, Path | None] = {}
        for path in self.leaf_at:
            text = path_text(path)
            found[text] = None if text in found else path
        return found

    def tensors(self) -> list[TensorInfo]:
        """Return the tensors in the order of the state; tied ones once."""
        paths: dict[int, list[str]] = {}
        kinds: dict[int, str] = {}
        for leaf in self.leaves:
            paths.setdefault(leaf.index, []).append(path_text(leaf.path))
            kinds.setdefault(leaf.index, leaf.kind)
        found = []
        for index, texts in paths.items():
            record = self.manifest.tensors[index]
            found.append(
                TensorInfo(
                    path=texts[0],
                    aliases=tuple(texts[1:]),
                    kind=kinds[index],
                    dtype=record.dtype,
                    shape=record.shape,
                    role=record.role,
                    nbytes=record.nbytes,
                    pieces=len(self.rows(index)),
                    **self._form(index),
                )
            )
        return found

    def judged(self, fixed: Mapping[Pattern, str] | None = None) -> dict[int, Judgement]:
        """Return the role of each tensor by its first path, and why; `fixed` roles come first."""
        records, rule = self.manifest.tensors, self.manifest.rule
        rules = RoleRules(fixed, node=self.node, records=records)
        firsts = {leaf.index: leaf.path for leaf in reversed(self.leaves)}
        return {at: rules.judge(firsts[at], records[at].role, rule) for at in reversed(firsts)}

    def _form(self, index: int) -> dict[str, Any]:
        """Return how a tensor is stored, and how far that is from what was saved."""
        records = self.manifest.tensors
        recipe = records[index].recipe
        if recipe is None:
            return {"coded_bytes": records[index].nbytes}
        bounds = ("max_abs", "rel_l2", "max_abs_bound", "rel_l2_bound")
        errors = {name: getattr(recipe, name) for name in bounds}
        first = recipe.sources[0]
        if first not in self.hidden:
            return {"encoding": DERIVED, "derived_from": self.labels[first], **errors}
        coded = sum(records[place].nbytes for place in recipe.sources)
        name = form_name(recipe.kind, recipe.code, recipe.block, records[first].dtype)
        return {"encoding": name, "coded_bytes": coded, **errors}

    def rows(self, index: int) -> list[int]:
        """Return the rows of the pieces that a tensor is read from: its own, or its sources'."""
        recipe = self.manifest.tensors[index].recipe
        first = self.manifest.first
        places = recipe.sources if recipe else (index,)
        return [row for place in places for row in range(first[place], first[place + 1])]


@collector_paused()
def read_content(manifest: Manifest) -> Content:
    """Decode and validate the skeleton of a manifest.

    Raises
    ------
    CorruptObjectError
        It is not a skeleton over the manifest's tensors, or a tensor is there that nothing needs.
        Limits passed are reported the same way: no save could have written it.
    """
    try:
        node = skeleton.decode(manifest.skeleton)
        validate(node, [record.nbytes for record in manifest.tensors])
        leaves = tuple(skeleton.iter_leaves(node))
    except CkptStoreError as error:
        msg = f"skeleton of version {manifest.version}: {error.message}"
        raise CorruptObjectError(msg, hint="run ckptstore verify") from error
    hidden = frozenset(range(len(manifest.tensors))) - {leaf.index for leaf in leaves}
    if lost := hidden - manifest.sources:
        msg = f"skeleton of version {manifest.version}: nothing names tensor {min(lost)}"
        raise CorruptObjectError(msg, hint="run ckptstore verify")
    return Content(
        manifest=manifest, node=node, leaves=leaves, labels=_labels(leaves, manifest), hidden=hidden
    )


def logical_bytes(manifest: Manifest) -> dict[str, int]:
    """Return the bytes of what a load gives back, by role; hidden tensors count for nothing.

    Raises
    ------
    CorruptObjectError
        The skeleton is none.
    """
    hidden = read_content(manifest).hidden if manifest.sources else frozenset()
    sizes = dict.fromkeys(sorted({record.role for record in manifest.tensors}), 0)
    for index, record in enumerate(manifest.tensors):
        sizes[record.role] += 0 if index in hidden else record.nbytes
    return sizes


def content_digest(manifest: Manifest) -> str:
    """Return the digest of what a version holds: its skeleton, what each tensor is, its pieces.

    Equal for equal states that were saved in the same encodings, wherever their pieces lie.
    """
    tensors = [r.identity for r in manifest.tensors]
    ids = manifest.pieces.ids[: manifest.first[-1]].tobytes()  # how they are stored tells nothing
    return blake3_of((manifest.skeleton, msgspec.msgpack.encode(tensors), ids)).hex()


def _labels(leaves: Sequence[Leaf], manifest: Manifest) -> tuple[str, ...]:
    """Return what errors call each record; a hidden one has the path of what needs it first."""
    paths: dict[int, Path] = {}
    for leaf in leaves:
        paths.setdefault(leaf.index, leaf.path)
    texts = {index: path_text(path) for index, path in paths.items()}
    for index, record in enumerate(manifest.tensors):
        for source in record.recipe.sources if record.recipe else ():
            texts.setdefault(source, texts.get(index, f"(record {index})"))
    return tuple(texts.get(i, f"(record {i})") for i in range(len(manifest.tensors)))
