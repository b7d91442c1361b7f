"""What a manifest says that a version holds: leaves and tensors; needs no torch and no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ckptstore.errors import CkptStoreError, CorruptObjectError
from ckptstore.format import skeleton
from ckptstore.format.manifest import Manifest
from ckptstore.format.paths import Path, path_text
from ckptstore.format.skeleton import Leaf, Node
from ckptstore.format.skeleton_check import validate
from ckptstore.hashing import blake3_of

__all__ = ["Content", "TensorInfo", "content_digest", "read_content"]


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
    """How many pieces it is cut into; 0 for an empty tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A manifest, understood."""

    manifest: Manifest
    node: Node
    """The skeleton, validated."""
    leaves: tuple[Leaf, ...]
    """In the order of the state."""
    labels: tuple[str, ...]
    """Per tensor record: the path that errors name it by."""

    def tensors(self) -> list[TensorInfo]:
        """Return the tensors in the order of the state; tied ones once."""
        paths: dict[int, list[str]] = {}
        kinds: dict[int, str] = {}
        for leaf in self.leaves:
            paths.setdefault(leaf.index, []).append(path_text(leaf.path))
            kinds.setdefault(leaf.index, leaf.kind)
        first = self.manifest.first
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
                    pieces=first[index + 1] - first[index],
                )
            )
        return found


def read_content(manifest: Manifest) -> Content:
    """Decode and validate the skeleton of a manifest.

    Raises
    ------
    CorruptObjectError
        It is not a skeleton over the manifest's tensors. Limits passed are reported the same way:
        no save could have written it.
    """
    try:
        node = skeleton.decode(manifest.skeleton)
        validate(node, [record.nbytes for record in manifest.tensors])
        leaves = tuple(skeleton.iter_leaves(node))
    except CkptStoreError as error:
        msg = f"skeleton of version {manifest.version}: {error.message}"
        raise CorruptObjectError(msg, hint="run ckptstore verify") from error
    return Content(
        manifest=manifest,
        node=node,
        leaves=leaves,
        labels=_labels(leaves, len(manifest.tensors)),
    )


def content_digest(manifest: Manifest) -> str:
    """Return the digest of what a version holds: its skeleton, what each tensor is, its pieces.

    Equal for equal states, wherever their pieces lie.
    """
    tensors = [r.identity for r in manifest.tensors]
    parts = (manifest.skeleton, msgspec.msgpack.encode(tensors), manifest.pieces.ids.tobytes())
    return blake3_of(parts).hex()


def _labels(leaves: Sequence[Leaf], count: int) -> tuple[str, ...]:
    paths: dict[int, Path] = {}
    for leaf in leaves:
        paths.setdefault(leaf.index, leaf.path)
    return tuple(path_text(paths[i]) if i in paths else f"(record {i})" for i in range(count))
