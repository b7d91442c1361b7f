"""A store of bytes in memory: the way of a state through flatten, skeleton bytes and restore."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.format.manifest import TensorRecord
from ckptstore.format.skeleton import Node, decode, encode, prune
from ckptstore.format.skeleton_check import validate
from ckptstore.tensors.flatten import flatten
from ckptstore.tensors.restore import Restorer
from ckptstore.tensors.tensor_bytes import SourceTensor, as_integers


class Kept(TensorRecord, frozen=True, kw_only=True):
    """A tensor's record and its bytes."""

    data: bytes


class Shelf:
    """One saved state, in memory."""

    def __init__(self, state: object, adapters: Sequence[Any] = ()) -> None:
        flat = flatten(state, adapters)
        self.skeleton = encode(flat.skeleton)
        self.sources: tuple[SourceTensor, ...] = flat.tensors
        self.records = [_keep(source) for source in flat.tensors]

    @property
    def node(self) -> Node:
        """The skeleton as a reader gets it, checked."""
        node = decode(self.skeleton)
        validate(node, [record.nbytes for record in self.records])
        return node

    def load(self, wanted: Callable[[Any], bool] | None = None, **options: Any) -> Any:  # noqa: ANN401
        """Return the state, or the wanted part of it."""
        node = self.node if wanted is None else prune(self.node, wanted)
        restorer = Restorer(node, self.records, **options)
        for index in restorer.needed:
            destination = restorer.destination(index)
            destination.view[:] = self.records[index].data
        for part in restorer.parts:
            storage, out = part.memory()
            elements = self.records[part.index].data.ljust(math.prod(part.shape) * part.item)
            whole = np.frombuffer(elements, out.dtype).reshape(part.shape)
            out[...] = whole[tuple(map(slice, part.offsets, np.add(part.offsets, part.sizes)))]
            restorer.finish_part(part, storage)
        return restorer.build()


def _keep(source: SourceTensor, step: int = 7) -> Kept:
    """Read a tensor whole and in odd pieces; both must give the same bytes."""
    whole = bytearray(source.nbytes)
    source.payload.copy_into(0, memoryview(whole))
    view = source.payload.view()
    assert view is None or bytes(view) == bytes(whole)
    pieces = bytearray(source.nbytes)
    size = max(step, source.nbytes // 11)
    for start in range(0, source.nbytes, size):
        source.payload.copy_into(start, memoryview(pieces)[start : start + size])
    assert pieces == whole
    return Kept(
        role="extra", dtype=source.dtype, shape=source.shape, order=source.order,
        nbytes=source.nbytes, data=bytes(whole),
    )  # fmt: skip


@pytest.fixture(scope="session")
def shelf() -> type[Shelf]:
    """Save a state into memory: ``shelf(state).load()``."""
    return Shelf


@pytest.fixture
def assert_same() -> Callable[[object, object], None]:
    """Assert that two states are equal in types, order, bits and strides."""
    return _assert_same


def _assert_same(a: Any, b: Any, at: str = "state") -> None:  # noqa: ANN401
    assert type(a) is type(b), at
    if isinstance(a, torch.Tensor):
        _same_tensor(a, b, at)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), at
        assert _raw(a) == _raw(b), at
    elif isinstance(a, np.generic):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), at
    elif isinstance(a, dict):
        assert [*map(_typed, a)] == [*map(_typed, b)], at
        for key in a:
            _assert_same(a[key], b[key], f"{at}.{key}")
        if isinstance(a, defaultdict):
            assert a.default_factory is b.default_factory, at
        if type(a) is OrderedDict:
            assert vars(a) == vars(b), at
    elif isinstance(a, list | tuple | deque) and not isinstance(a, torch.Size):
        assert len(a) == len(b), at
        for position, (x, y) in enumerate(zip(a, b, strict=True)):
            _assert_same(x, y, f"{at}.{position}")
        assert not isinstance(a, deque) or a.maxlen == b.maxlen, at
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b), at
    elif isinstance(a, complex):
        assert struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag), at
    elif isinstance(a, torch.Generator):
        assert torch.equal(a.get_state(), b.get_state()), at
    else:
        assert a == b, at


def _raw(array: np.ndarray[Any, Any]) -> bytes:
    """Return all bytes, also those between the fields of a structure."""
    size = array.dtype.itemsize
    return array.view(np.dtype((np.void, size))).tobytes() if size else b""


def _typed(key: object) -> tuple[type, object]:
    return type(key), key


def _same_tensor(a: torch.Tensor, b: torch.Tensor, at: str) -> None:
    assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad), at
    assert a.stride() == b.stride(), at
    if a.is_quantized and a.element_size() * a.numel() > a.untyped_storage().nbytes():
        assert bytes(a.untyped_storage()) == bytes(b.untyped_storage()), at  # packed
    else:
        assert torch.equal(as_integers(a), as_integers(b)), at
