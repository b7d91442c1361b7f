"""The skeleton: everything of a state but the bytes of its tensors, as plain MessagePack values.

A node is None, a bool, an int of 64 bits, a float, a str or bytes, which stand for themselves, or a
list ``[tag, ...]``. "node" below is any node, "key" one of the nodes that a dict key may be (None,
bool, int, float, str, bytes, ``i``, ``u``, and ``t`` of these). ``?`` marks what may be left out at
the end.

======  ===================================  ====================================================
tag     fields                               stands for
======  ===================================  ====================================================
``d``   key, node, key, node, ...            dict, in order
``o``   attributes, key, node, ...           OrderedDict; attributes (``_metadata``): ``d`` or None
``dd``  factory, key, node, ...              defaultdict; factory: a builtin's name or None
``ct``  key, node, ...                       Counter
``l``   node, ...                            list
``t``   node, ...                            tuple
``s``   node, ...                            set, of keys
``fs``  node, ...                            frozenset, of keys
``q``   maxlen, node, ...                    deque; maxlen: int or None
``c``   float, float                         complex
``i``   str                                  int beyond 64 bits, in decimal
``u``   bytes                                str with lone surrogates (UTF-8, surrogatepass)
``ba``  bytes                                bytearray
``r``   node, node, node                     range: start, stop, step
``sl``  node, node, node                     slice: start, stop, step
``p``   kind, str                            path: ``path``, ``pureposix`` or ``purewindows``
``da``  str                                  date, ISO 8601
``dm``  str, fold                            datetime, ISO 8601, with UTC offset or naive
``td``  days, seconds, microseconds          timedelta
``dt``  str                                  torch.dtype
``dv``  str                                  torch.device
``sz``  int, ...                             torch.Size
``nd``  dtype                                numpy.dtype
``ns``  dtype, bytes                         NumPy scalar
``x``   adapter name, node                   object of a type that an adapter represents
``m``                                        an element that a partial load left out
``T``   index, flags?, object?, device?      tensor
``V``   index, torch dtype, byte offset,     view of the bytes of tensor `index`: shape and
        shape, strides, flags?, object?,     strides are lists of ints, strides in elements
        device?
``Q``   T or V, dtype, shape, scheme, node   quantized tensor over its integers; shape None: theirs
``N``   index, dtype?                        NumPy array; dtype None: the record's
``B``   index, kind                          ``bytes``, ``bytearray`` or ``str`` kept as a tensor
``G``   device, T                            torch.Generator with its state
======  ===================================  ====================================================

flags: 1 requires_grad, 2 Parameter, 4 Buffer, 8 Buffer that is not persistent. object: leaves of
one tensor with equal flags and object number are one Python object, others share the memory only.
device: where the tensor was, if not on the CPU. A NumPy dtype is its ``str`` or ``["f", itemsize,
aligned, [[name, title, dtype, offset, shape], ...]]``. Views refer to tensors, never to views:
there are no cycles. Scheme and node of ``Q`` are those of :mod:`ckptstore.tensors.quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, LimitError
from ckptstore.format.paths import Key, Path

if TYPE_CHECKING:
    from ckptstore.format.tables import TensorRecord

KeysBelow: TypeAlias = Callable[[Path], tuple[Collection[str], tuple[str, ...]] | None]
Node: TypeAlias = "bool | int | float | str | bytes | list[Node] | None"

REQUIRES_GRAD: Final = 1
PARAMETER: Final = 2
BUFFER: Final = 4
BUFFER_TRANSIENT: Final = 8

# Where the key-value pairs, or the items, of a container begin.
MAPS: Final = {"d": 1, "o": 2, "dd": 2, "ct": 1}
SEQUENCES: Final = {"l": 1, "t": 1, "q": 2}
LEAF_KINDS: Final = {
    "T": "tensor", "V": "view", "N": "numpy", "B": "bytes", "Q": "quantized", "G": "generator",
}  # fmt: skip

# First bytes of MessagePack arrays, maps and extensions: an upper bound of how many containers a
# record makes the decoder build (the same bytes also occur inside of strings and numbers).
_CONTAINER_BYTES: Final = bytes([*range(0x80, 0xA0), *range(0xC7, 0xCA), *range(0xD4, 0xE0)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One place of the state whose bytes are in a tensor record."""

    path: Path
    """Keys and positions that lead there."""
    kind: str
    """``tensor``, ``parameter``, ``buffer``, ``view``, ``quantized``, ``numpy``, ``bytes`` or
    ``generator``."""
    index: int
    """The record, from 0; for a view, the record of its base."""
    node: Node
    """The skeleton's node, for those who rebuild."""


def kind_of(leaf: Leaf, record: TensorRecord) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of a leaf; a view has its own."""
    node = leaf.node
    if isinstance(node, list) and node[0] == "V" and isinstance(node[4], list):
        return str(node[2]), tuple(node[4])  # type: ignore[arg-type]  # validated: ints
    return record.dtype, record.shape


def retyped(leaves: Sequence[Leaf], records: Sequence[TensorRecord]) -> set[int]:
    """Return the records whose bits a view reads as another dtype."""
    kinds = ((leaf.index, kind_of(leaf, records[leaf.index])[0]) for leaf in leaves)
    return {index for index, dtype in kinds if dtype != records[index].dtype}


def encode(node: Node) -> bytes:
    """Return the bytes of a skeleton.

    Raises
    ------
    LimitError
        It is larger than a reader accepts.
    """
    data = msgspec.msgpack.encode(node)
    _check_size(data)
    return data


def decode(data: bytes | memoryview) -> Node:
    """Return the node of `data`; it is hostile until ``skeleton_check.validate`` has passed it.

    Raises
    ------
    CorruptObjectError
        The bytes are not MessagePack, or nested beyond reason.
    LimitError
        Building the node could take more memory than a reader grants.
    """
    _check_size(data)
    try:
        node: Node = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise CorruptObjectError(f"the skeleton is not valid MessagePack: {error}") from error
    return node


def _check_size(data: bytes | memoryview) -> None:
    if len(data) > limits.SKELETON_BYTES_MAX:
        msg = f"the skeleton has {len(data)} bytes, more than {limits.SKELETON_BYTES_MAX}"
        raise LimitError(msg, hint="keep long lists of numbers as tensors or NumPy arrays")
    if len(data) > limits.STATE_NODES_MAX:
        containers = len(data) - len(bytes(data).translate(None, _CONTAINER_BYTES))
        if containers > limits.STATE_NODES_MAX:
            msg = f"the skeleton may have {containers} containers, limit {limits.STATE_NODES_MAX}"
            raise LimitError(msg, hint="keep long lists of numbers as tensors or NumPy arrays")


def text_node(value: str) -> Node:
    """Return the node of a text; lone surrogates (from file names, for example) are kept."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["u", value.encode("utf-8", "surrogatepass")]
    return value


def decode_key(node: Node) -> Key:
    """Return the dict key that a validated key node stands for."""
    if not isinstance(node, list):
        return node
    tag = node[0]
    if tag == "t":
        return tuple([decode_key(item) for item in node[1:]])
    if tag == "i":
        return int(str(node[1]))
    text = node[1]
    if tag != "u" or not isinstance(text, bytes):
        raise CorruptObjectError(f"{tag!r} is not the tag of a dict key")
    return text.decode("utf-8", "surrogatepass")


def pairs(node: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """Yield the key and value nodes of a map's node."""
    start = MAPS[str(node[0])]
    return zip(node[start::2], node[start + 1 :: 2], strict=True)


def iter_leaves(node: Node) -> list[Leaf]:
    """Return the leaves that need a tensor record, in the order of the state."""
    leaves: list[Leaf] = []
    if isinstance(node, list):
        _collect(node, (), leaves)
    return leaves


def _collect(node: list[Node], path: Path, leaves: list[Leaf]) -> None:
    tag = node[0]
    if tag in MAPS:
        if tag == "o" and isinstance(node[1], list):
            _collect(node[1], path, leaves)
        for key, value in pairs(node):
            if type(value) is list:
                _collect(value, (*path, decode_key(key)), leaves)
    elif tag in SEQUENCES:
        for position, item in enumerate(node[SEQUENCES[tag] :]):
            if type(item) is list:
                _collect(item, (*path, position), leaves)
    elif tag == "x":
        if isinstance(node[2], list):
            _collect(node[2], path, leaves)
    elif tag in LEAF_KINDS:
        leaves.append(_leaf(path, node))
        if tag == "Q" and isinstance(node[5], list):
            _collect(node[5], (*path, "quantizer"), leaves)


def _leaf(path: Path, node: list[Node]) -> Leaf:
    inner = node[1] if node[0] == "Q" else node[2] if node[0] == "G" else node
    if not isinstance(inner, list) or not isinstance(inner[1], int):
        raise CorruptObjectError("a leaf of the skeleton has no tensor index")
    kind = LEAF_KINDS[str(node[0])]
    if kind == "tensor" and len(node) > 2 and isinstance(node[2], int):
        kind = "parameter" if node[2] & PARAMETER else "buffer" if node[2] & BUFFER else kind
    return Leaf(path=path, kind=kind, index=inner[1], node=node)


_GONE: Final = object()


def prune(
    node: Node, wanted: Callable[[Path], bool], keys_below: KeysBelow = lambda _: None
) -> Node:
    """Return the part of a skeleton whose leaves are wanted.

    A leaf here is everything that is not a dict, list, tuple or deque, and an empty one of these.
    Dict entries that are not wanted go; a container left with nothing goes too. In a list, tuple
    or deque that keeps at least one element, the others become ``MISSING``, so that positions
    stand. An object of an adapter is kept whole if its path, or a tensor in it, is wanted.
    Attributes of an OrderedDict stay with it. If nothing is wanted, the result is an empty dict.
    Where `keys_below` tells the texts of keys below a path, or how they start, others are passed.
    """
    kept = _prune(node, (), wanted, keys_below)
    return ["d"] if kept is _GONE else kept  # type: ignore[return-value]


def _prune(node: Node, path: Path, wanted: Callable[[Path], bool], keys_below: KeysBelow) -> object:
    tag = node[0] if isinstance(node, list) else None
    if isinstance(node, list) and tag in MAPS and len(node) > MAPS[str(tag)]:
        entries: list[Node] = []
        found = pairs(node)
        if (below := keys_below(path)) is not None:
            keys, starts = below
            found = (
                pair
                for pair in found
                if type(key := pair[0]) is not str or key in keys or key.startswith(starts)
            )
        for key, value in found:
            kept = _prune(value, (*path, decode_key(key)), wanted, keys_below)
            if kept is not _GONE:
                entries += [key, kept]  # type: ignore[list-item]
        return [*node[: MAPS[str(tag)]], *entries] if entries else _GONE
    if isinstance(node, list) and tag in SEQUENCES and len(node) > SEQUENCES[str(tag)]:
        start = SEQUENCES[str(tag)]
        items = [_prune(x, (*path, at), wanted, keys_below) for at, x in enumerate(node[start:])]
        if all(item is _GONE for item in items):
            return _GONE
        return [*node[:start], *(["m"] if item is _GONE else item for item in items)]
    if isinstance(node, list) and tag == "x" and isinstance(node[2], list):
        inside: list[Leaf] = []
        _collect(node[2], path, inside)
        return node if any([wanted(path), *(wanted(leaf.path) for leaf in inside)]) else _GONE
    return node if wanted(path) else _GONE
