"""Reads the entry ``pretrained`` of a version without torch: configurations and small files."""

from __future__ import annotations

from typing import Any

from ckptstore import limits
from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, read_ranges
from ckptstore.checkpoint.selection import BESIDE
from ckptstore.errors import InvalidInputError, LimitError
from ckptstore.format.skeleton import MAPS, Node, decode_key, pairs
from ckptstore.repo import Repo


def read_kept(content: Content, repo: Repo) -> Any:  # noqa: ANN401 - plain values
    """Return what a version holds beside its weights; None if nothing.

    Raises
    ------
    InvalidInputError
        It is no plain value.
    LimitError
        It is too large.
    CkptStoreError
        As :func:`ckptstore.checkpoint.ranges.read_ranges`.
    """
    node = dict(_entries(content.node)).get(BESIDE)
    if node is None:
        return None
    leaves = [leaf for leaf in content.leaves if leaf.path[:1] == (BESIDE,)]
    records = content.manifest.tensors
    sizes = {leaf.index: records[leaf.index].nbytes for leaf in leaves}
    if sum(sizes.values()) > limits.PRETRAINED_BYTES_MAX:
        msg = f"the files of the version have more than {limits.PRETRAINED_BYTES_MAX} bytes"
        raise LimitError(msg, hint="ckptstore export writes its weights")
    blobs = {index: memoryview(bytearray(size)) for index, size in sizes.items()}
    ranges = [Range(index=i, start=0, nbytes=len(out), out=out) for i, out in blobs.items()]
    read_ranges(content, ranges, backend=repo.load_backend, options=repo.options)
    return _value(node, blobs)


def _entries(node: Node) -> list[tuple[object, Node]]:
    if not isinstance(node, list) or node[0] not in MAPS:
        return []
    return [(decode_key(key), value) for key, value in pairs(node)]


def _value(node: Node, blobs: dict[int, memoryview]) -> Any:  # noqa: ANN401 - plain values
    """Return the plain value of a node."""
    if not isinstance(node, list):
        return node
    tag = node[0]
    if tag in MAPS:
        return {key: _value(value, blobs) for key, value in _entries(node)}
    if tag in {"l", "t"}:
        return [_value(value, blobs) for value in node[1:]]
    if tag in {"u", "i"}:
        return decode_key(node)
    if tag == "B" and isinstance(node[1], int):
        data = bytes(blobs[node[1]])
        return data.decode("utf-8", "surrogatepass") if node[2] == "str" else data
    msg = f"the version holds something at {BESIDE!r} that is no plain value: {tag!r}"
    raise InvalidInputError(msg, hint="save what describe_model returns")
