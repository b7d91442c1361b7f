"""Holds a skeleton against its grammar before anything is built from it; the input is hostile.

:func:`validate` is called on what is about to be written, too: what passes there loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, LimitError
from ckptstore.format.dtypes import ITEM_BYTES, QUANTIZED_PER_BYTE
from ckptstore.format.paths import Key, Path, path_text
from ckptstore.format.skeleton import MAPS, SEQUENCES, Node, decode_key

_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_FACTORIES: Final = frozenset(
    {"int", "float", "str", "bool", "list", "dict", "set", "tuple", "bytes"}
)
_INT64_MAX: Final = (1 << 63) - 1
_FLAGS_MAX: Final = 15
_NAME_CHARS_MAX: Final = 1000
_SCHEMES: Final = frozenset({"none", "tensor", "channel", "channel_float"})


def validate(node: Node, tensor_bytes: Sequence[int]) -> None:
    """Check that `node` is a skeleton over tensors of the sizes `tensor_bytes`.

    Parameters
    ----------
    node
        What :func:`ckptstore.format.skeleton.decode` returned.
    tensor_bytes
        Bytes of each tensor record, in order; views must stay inside of their base.

    Raises
    ------
    CorruptObjectError
        A tag, an arity, a type, an index, a view or a key is not allowed; the message has the path.
    LimitError
        It is nested too deep or has too many nodes.
    """
    _Checker(tensor_bytes).check(node, (), 0)


class _Checker:
    """One pass over one skeleton."""

    def __init__(self, tensor_bytes: Sequence[int]) -> None:
        self._tensor_bytes = tensor_bytes
        self._nodes = 0

    def check(self, node: object, path: Path, depth: int) -> None:
        """Check a node and all below it."""
        self._count()
        if type(node) in _PLAIN:
            return
        if type(node) is not list or not node or type(node[0]) is not str:
            raise _bad(path, f"a {type(node).__name__} is not a node")
        if depth >= limits.STATE_DEPTH_MAX:
            msg = f"the state is nested deeper than {limits.STATE_DEPTH_MAX} levels at {_at(path)}"
            raise LimitError(msg)
        tag = node[0]
        if tag in MAPS:
            self._map(tag, node, path, depth)
        elif tag in SEQUENCES:
            start = SEQUENCES[tag]
            if tag == "q":
                _require(len(node) > 1, path, "a deque has no maxlen")
                most = node[1]
                _require(most is None or _is_size(most), path, "a deque's maxlen is no size")
                fits = most is None or len(node) - 2 <= most
                _require(fits, path, "a deque passes its maxlen")
            for position, item in enumerate(node[start:]):
                self.check(item, (*path, position), depth + 1)
        else:
            rule = _RULES.get(tag)
            if rule is None:
                raise _bad(path, f"unknown tag {tag[:40]!r}")
            rule(self, node, path, depth)

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > limits.STATE_NODES_MAX:
            raise LimitError(f"the state has more than {limits.STATE_NODES_MAX} values")

    def _map(self, tag: str, node: list[object], path: Path, depth: int) -> None:
        start = MAPS[tag]
        _require(len(node) >= start and (len(node) - start) % 2 == 0, path, "a key has no value")
        if tag == "o" and node[1] is not None:
            _require(type(node[1]) is list and node[1][:1] == ["d"], path, "attributes are no dict")
            self.check(node[1], path, depth + 1)
            names = node[1][1::2] if isinstance(node[1], list) else []
            _require(all(type(name) is str for name in names), path, "an attribute has no name")
        if tag == "dd":
            known = node[1] is None or (type(node[1]) is str and node[1] in _FACTORIES)
            _require(known, path, "unknown default factory")
        seen: set[Key] = set()
        for at in range(start, len(node), 2):
            key = self._key(node[at], path, depth)
            if key in seen:
                raise _bad(path, f"the key {key!r} occurs twice")
            seen.add(key)
            self.check(node[at + 1], (*path, key), depth + 1)

    def _key(self, node: object, path: Path, depth: int) -> Key:
        self._count()
        if type(node) is list:
            _require(depth < limits.STATE_DEPTH_MAX, path, "a key is nested too deep")
            _require(len(node) > 0 and node[0] in ("t", "i", "u"), path, "not a dict key")
            if node[0] == "t":
                return tuple([self._key(item, path, depth + 1) for item in node[1:]])
            self.check(node, path, depth)
            return decode_key(node)
        _require(type(node) in _PLAIN and node == node, path, "not a dict key")
        return node  # type: ignore[return-value]

    def members(self, node: list[object], path: Path, depth: int) -> None:
        """Check a set's elements."""
        seen: set[Key] = set()
        for item in node[1:]:
            key = self._key(item, path, depth + 1)
            _require(key not in seen, path, "a set has an element twice")
            seen.add(key)

    def tensor(self, node: list[object], path: Path, _depth: int) -> None:
        _require(2 <= len(node) <= 5, path, "a tensor has the wrong number of fields")
        self.index(node[1], path)
        if len(node) > 2:
            _check_tail(node[2:], path)

    def index(self, value: object, path: Path) -> int:
        if type(value) is not int or not 0 <= value < len(self._tensor_bytes):
            raise _bad(path, f"the tensor index {value!r} is out of range")
        return value

    def view(self, node: list[object], path: Path, _depth: int) -> None:
        """Check that a view lies inside of its tensor."""
        _require(6 <= len(node) <= 9, path, "a view has the wrong number of fields")
        size = self._tensor_bytes[self.index(node[1], path)]
        dtype, offset, shape, strides = node[2:6]
        _require(type(dtype) is str and dtype in ITEM_BYTES, path, "a view has an unknown dtype")
        _check_sizes(shape, path)
        _check_sizes(strides, path)
        if type(offset) is not int or type(shape) is not list or type(strides) is not list:
            raise _bad(path, "a view's offset, shape or strides have the wrong type")
        item = ITEM_BYTES[str(dtype)]
        _require(len(shape) == len(strides), path, "a view's shape and strides differ in length")
        inside = 0 <= offset <= size and offset % item == 0
        _require(inside, path, "a view's offset is out of range")
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape:
            _require(offset + (last + 1) * item <= size, path, "a view reaches past its tensor")
        _check_tail(node[6:], path)

    def quantized(self, node: list[object], path: Path, depth: int) -> None:
        """Check a quantized tensor's integers and parameters."""
        _require(len(node) == 6, path, "a quantized tensor has the wrong number of fields")
        self._inner(node[1], ("T", "V"), path, depth)
        _require(type(node[2]) is str and node[2] in QUANTIZED_PER_BYTE, path, "unknown dtype")
        if node[3] is not None:
            _check_sizes(node[3], path)
        _require(type(node[4]) is str and node[4] in _SCHEMES, path, "unknown scheme")
        self.check(node[5], path, depth + 1)

    def _inner(self, node: object, tags: tuple[str, ...], path: Path, depth: int) -> None:
        _require(type(node) is list and len(node) > 0 and node[0] in tags, path, "not a tensor")
        self.check(node, path, depth)

    def generator(self, node: list[object], path: Path, depth: int) -> None:
        _require(len(node) == 3 and _is_name(node[1]), path, "a generator has wrong fields")
        self._inner(node[2], ("T",), path, depth)

    def adapted(self, node: list[object], path: Path, depth: int) -> None:
        _require(len(node) == 3 and _is_name(node[1]), path, "an adapter's name is not valid")
        self.check(node[2], path, depth + 1)

    def array(self, node: list[object], path: Path, _depth: int) -> None:
        """Check a NumPy array, whose dtype may have no twin in torch."""
        _require(2 <= len(node) <= 3, path, "a NumPy array has the wrong number of fields")
        self.index(node[1], path)
        if len(node) == 3:
            _check_numpy(node[2], path, 0)

    def blob(self, node: list[object], path: Path, _depth: int) -> None:
        _require(len(node) == 3, path, "a long value has the wrong number of fields")
        self.index(node[1], path)
        _require(node[2] in ("bytes", "bytearray", "str"), path, "a long value of unknown kind")

    def three(self, node: list[object], path: Path, depth: int) -> None:
        """Check a range or a slice."""
        _require(len(node) == 4, path, f"{node[0]} needs three values")
        for item in node[1:]:
            self.check(item, path, depth + 1)
        if node[0] == "r":
            whole = all(type(v) is int or (type(v) is list and v[0] == "i") for v in node[1:])
            _require(whole and node[3] != 0, path, "a range needs integers and a step")


def _check_tail(tail: list[object], path: Path) -> None:
    flags, identity, device = (tail + [0, 0, ""][len(tail) :])[:3]
    ok = type(flags) is int and 0 <= flags <= _FLAGS_MAX and type(identity) is int
    _require(ok and _is_size(identity), path, "a tensor's flags are not valid")
    _require(type(device) is str and len(device) <= _NAME_CHARS_MAX, path, "not a device")


def _check_sizes(value: object, path: Path) -> None:
    if type(value) is not list or len(value) > limits.TENSOR_DIMS_MAX:
        raise _bad(path, "a shape or strides are not a short list")
    count = 1
    for size in value:
        _require(_is_size(size), path, f"the dimension {size!r} is out of range")
        count *= max(size, 1)
    _require(count <= _INT64_MAX, path, "a shape has more than 2**63 elements")


def _check_numpy(value: object, path: Path, depth: int) -> None:
    if type(value) is str:
        _require(0 < len(value) <= _NAME_CHARS_MAX, path, "a NumPy dtype's name is not valid")
        return
    _require(depth < 16, path, "a NumPy dtype is nested too deep")
    if type(value) is not list or len(value) != 4 or value[0] != "f":
        raise _bad(path, "a NumPy dtype is not valid")
    _require(_is_size(value[1]) and type(value[2]) is bool, path, "a NumPy dtype is not valid")
    fields = value[3]
    if type(fields) is not list:
        raise _bad(path, "a NumPy dtype has no fields")
    for field in fields:
        if type(field) is not list or len(field) != 5:
            raise _bad(path, "a field of a NumPy dtype is not valid")
        name, title, inner, offset, shape = field
        ok = type(name) is str and (title is None or type(title) is str) and _is_size(offset)
        _require(ok, path, "a field of a NumPy dtype is not valid")
        _check_sizes(shape, path)
        _check_numpy(inner, path, depth + 1)


def _numpy_scalar(_checker: _Checker, node: list[object], path: Path, _depth: int) -> None:
    _require(len(node) == 3 and type(node[2]) is bytes, path, "a NumPy scalar has wrong fields")
    _check_numpy(node[1], path, 0)


def _numpy_dtype(_checker: _Checker, node: list[object], path: Path, _depth: int) -> None:
    _require(len(node) == 2, path, "a NumPy dtype has wrong fields")
    _check_numpy(node[1], path, 0)


def _big_int(_checker: _Checker, node: list[object], path: Path, _depth: int) -> None:
    text = node[1] if len(node) == 2 else None
    if type(text) is not str or len(text) > limits.INT_DIGITS_MAX + 1:
        raise _bad(path, "an integer is too long or has wrong fields")
    digits = text[1:] if text[:1] == "-" else text
    _require(digits.isascii() and digits.isdigit(), path, "an integer has characters but digits")


def _text(_checker: _Checker, node: list[object], path: Path, _depth: int) -> None:
    raw = node[1] if len(node) == 2 else None
    if type(raw) is not bytes:
        raise _bad(path, "a string has wrong fields")
    try:
        raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise _bad(path, "a string is not UTF-8") from error


def _path(checker: _Checker, node: list[object], path: Path, depth: int) -> None:
    _require(len(node) == 3, path, "a file path has wrong fields")
    _require(node[1] in ("path", "pureposix", "purewindows"), path, "unknown kind of file path")
    surrogates = type(node[2]) is list and node[2][:1] == ["u"]
    _require(type(node[2]) is str or surrogates, path, "a file path is not text")
    checker.check(node[2], path, depth + 1)


def _fields(*types: type) -> Callable[[_Checker, list[object], Path, int], None]:
    def rule(_checker: _Checker, node: list[object], path: Path, _depth: int) -> None:
        ok = [type(value) for value in node[1:]] == list(types)
        _require(ok, path, f"{node[0]} has wrong fields")

    return rule


_RULES: Final[dict[str, Callable[[_Checker, list[object], Path, int], None]]] = {
    "s": _Checker.members,
    "fs": _Checker.members,
    "c": _fields(float, float),
    "i": _big_int,
    "u": _text,
    "ba": _fields(bytes),
    "r": _Checker.three,
    "sl": _Checker.three,
    "p": _path,
    "da": _fields(str),
    "dm": _fields(str, int),
    "td": _fields(int, int, int),
    "dt": _fields(str),
    "dv": _fields(str),
    "sz": lambda _, node, path, _d: _check_sizes(node[1:], path),
    "nd": _numpy_dtype,
    "ns": _numpy_scalar,
    "x": _Checker.adapted,
    "m": lambda _, node, path, _d: _require(len(node) == 1, path, "a missing element has fields"),
    "T": _Checker.tensor,
    "V": _Checker.view,
    "Q": _Checker.quantized,
    "N": _Checker.array,
    "B": _Checker.blob,
    "G": _Checker.generator,
}


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT64_MAX


def _is_name(value: object) -> bool:
    return type(value) is str and 0 < len(value) <= _NAME_CHARS_MAX


def _at(path: Path) -> str:
    text = path_text(path)
    return repr(text if len(text) <= 300 else text[:300] + "...") if path else "the top"


def _require(condition: bool, path: Path, problem: str) -> None:
    if not condition:
        raise _bad(path, problem)


def _bad(path: Path, problem: str) -> CorruptObjectError:
    return CorruptObjectError(f"the skeleton is damaged at {_at(path)}: {problem}")
