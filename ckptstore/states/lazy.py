"""Lazy reading: a version whose tensors are fetched on access, and only the parts needed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import EllipsisType
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ckptstore import errors
from ckptstore.backends.transfers import operation
from ckptstore.checkpoint.cold_reads import naming_change, naming_cold
from ckptstore.checkpoint.content import Content, TensorInfo
from ckptstore.checkpoint.regions import Region, read_regions
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.dtypes import ITEM_BYTES, bytes_of
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Path, Pattern, find_path, path_text
from ckptstore.format.skeleton import Leaf, Node, kind_of
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.shown import HtmlTable, Shown, bytes_text
from ckptstore.states.load import LoadRequest, load_state
from ckptstore.suggestions import Suggesting
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.bfloat16 import to_bfloat16
from ckptstore.tensors.destination import Destination, check_record
from ckptstore.tensors.restore import MapLocation

Index: TypeAlias = "int | slice | EllipsisType | torch.Tensor | tuple[Any, ...] | None"

# Leaves that are exactly one stored tensor, so that a part of them is a box of its elements.
SLICEABLE: Final = frozenset({"tensor", "parameter", "buffer"})


class LazyVersion(Shown):
    """One version, read only as far as its manifest.

    It has the attributes of :class:`ckptstore.Version` (``id``, ``run``, ``step``, ``metrics``,
    ...). Any thread may use it while the store is open.
    """

    def __init__(
        self,
        repo: Repo,
        info: Version,
        content: Content,
        *,
        whole: Callable[[errors.CkptStoreError], Content] | None = None,
        again: Callable[[], LazyVersion] | None = None,
    ) -> None:
        self._repo = repo
        self._content = content
        # Of a version that is kept only in part: gets the error that makes it necessary, and
        # returns the whole version from another store.
        self._whole = whole
        # Returns the version again; stored in a pickle. None: it cannot be pickled.
        self._again = again
        self.info = info
        """The version as the catalog knows it."""

    def __repr__(self) -> str:
        """Return run, step and size."""
        info = self.info
        return f"<LazyVersion {info.run}@{info.step} #{info.id[:8]}, {len(self)} tensors>"

    def _summary(self) -> HtmlTable:
        rows = [(x.path, x.dtype, list(x.shape), bytes_text(x.nbytes)) for x in self.tensors()]
        columns = ("TENSOR", "DTYPE", "SHAPE", "SIZE")
        return HtmlTable(title=repr(self), columns=columns, rows=rows)

    def __reduce__(self) -> tuple[object, ...]:
        return (self._again, ()) if self._again is not None else self._repo.__reduce__()

    @property
    def id(self) -> str:
        """32 hex digits."""
        return self.info.id

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.info.run

    @property
    def step(self) -> int:
        """Training step at which it was saved."""
        return self.info.step

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics at the time of the lookup."""
        return self.info.metrics

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags at the time of the lookup."""
        return self.info.tags

    @property
    def parent(self) -> str:
        """Id of the version that it continues; empty for the first."""
        return self.info.parent

    @property
    def created_at(self) -> datetime:
        """Time of the commit, UTC."""
        return self.info.created_at

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The user's own JSON object."""
        return self.info.metadata

    def keys(self) -> list[str]:
        """Return the paths of all tensors in the order of the state, tied ones included."""
        return [path_text(path) for path in self._content.leaf_at]

    def __iter__(self) -> Iterator[str]:
        """Iterate over :meth:`keys`."""
        return iter(self.keys())

    def __len__(self) -> int:
        """Return the number of :meth:`keys`."""
        return len(self._content.leaf_at)

    def __contains__(self, key: object) -> bool:
        """Return whether a tensor has this path."""
        content = self._content
        return key in (content.leaf_at if isinstance(key, tuple) else content.path_of)

    def tensors(self) -> list[TensorInfo]:
        """Return a description of each tensor; tied ones once."""
        return self._content.tensors()

    def __getitem__(self, key: Pattern) -> LazyTensor:
        """Return the tensor at a path, unread.

        Raises
        ------
        TensorNotFoundError
            No tensor has this path; the hint names similar ones.
        InvalidInputError
            Several tensors have this text; name one by the tuple of its keys.
        """
        content = self._content
        path = key if isinstance(key, tuple) else content.path_of.get(key)
        if path is None or path not in content.leaf_at:
            try:
                path = find_path(list(content.leaf_at), key)
            except errors.TensorNotFoundError as error:
                if self._whole is None:
                    raise
                return self._all(error)[key]
        return LazyTensor(self._repo, content, content.leaf_at[path], self.info)

    def _all(self, error: errors.CkptStoreError) -> LazyVersion:
        """Return the whole of a version that is kept here only in part."""
        assert self._whole is not None  # noqa: S101  # for the type checker: the callers looked
        return LazyVersion(self._repo, self.info, self._whole(error))

    def load(
        self,
        *,
        include: Sequence[Pattern] | None = None,
        exclude: Sequence[Pattern] | None = None,
        map_location: MapLocation = None,
        into: object = None,
        adapters: Sequence[TypeAdapter] = (),
        progress: ProgressCallback = silent,
    ) -> Any:  # noqa: ANN401 - whatever was saved
        """Return the state, or a part of it; see :meth:`ckptstore.Store.load`."""
        request = LoadRequest(
            include=include, exclude=exclude, map_location=map_location, into=into,
            adapters=adapters, progress=progress,
        )  # fmt: skip
        return self._load_as(request)

    @operation("lazy")
    def _load_as(self, request: LoadRequest) -> Any:  # noqa: ANN401 - whatever was saved
        """Return the state, or a part of it; as :meth:`load`, by one record of its arguments."""
        shown = f"{self.info.run}@{self.info.step}"
        cold = naming_cold(
            self.info.id,
            self._repo.url,
            shown=shown,
            include=request.include,
            exclude=request.exclude,
        )
        with naming_change(self._repo, self.info), cold:
            try:
                return load_state(self._repo, self._content, request)
            except errors.TensorNotFoundError as error:  # raised before anything is read
                if self._whole is None:
                    raise
                return load_state(self._repo, self._all(error)._content, request)


class LazyTensor(Suggesting):
    """One tensor of a version, unread. Indexing fetches only the chunks that it needs.

    Leading integers and slices select a box, and only pieces that hold an element of it are read;
    the rest of the index is applied in memory. Quantized tensors and NumPy arrays are read whole,
    then indexed.
    """

    def __init__(
        self, repo: Repo, content: Content, leaf: Leaf, info: Version | None = None
    ) -> None:
        self._repo = repo
        self._info = info
        self._content = content
        self._leaf = leaf
        self._record: TensorRecord = content.manifest.tensors[leaf.index]
        self._kind = kind_of(leaf, self._record)

    def __repr__(self) -> str:
        """Return path, dtype and shape."""
        return f"<LazyTensor {self.path} {self.dtype}{list(self.shape)}>"

    @property
    def path(self) -> str:
        """Path in the state, with dots between the keys."""
        return path_text(self._leaf.path)

    @property
    def key(self) -> Path:
        """Path in the state, as the tuple of keys."""
        return self._leaf.path

    @property
    def dtype(self) -> str:
        """Torch's name of the stored dtype, without ``torch.``."""
        return self._kind[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the stored tensor, by dimension."""
        return self._kind[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor in memory."""
        return bytes_of(*self._kind)

    def __len__(self) -> int:
        """Return the size of the first dimension.

        Raises
        ------
        TensorIndexError
            It has no dimensions.
        """
        if not self.shape:
            msg = f"{self.path} has no dimensions"
            raise errors.TensorIndexError(msg, hint="read it with .load()")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the first dimension, one fetch a step; slices of many rows cost less."""
        return (self[place] for place in range(len(self)))

    @operation("lazy")
    def load(self) -> Any:  # noqa: ANN401 - a tensor, or a NumPy array where that was saved
        """Return the whole leaf, as it was saved.

        Raises
        ------
        CorruptTensorError
            A piece is damaged.
        StorageError
            The storage failed.
        """
        return self._load(self._leaf.node)

    def _load(self, node: Node) -> Any:  # noqa: ANN401 - as for load
        with naming_change(self._repo, self._info):
            return load_state(self._repo, self._content, LoadRequest(), node)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the whole leaf as a NumPy array.

        Raises
        ------
        InvalidInputError
            NumPy has no such dtype: bfloat16, fp8.
        CorruptTensorError, StorageError
            As :meth:`load`.
        """
        found = self.load()
        if isinstance(found, np.ndarray):
            return found
        try:
            array: np.ndarray[Any, Any] = found.detach().numpy()
        except (TypeError, RuntimeError) as error:
            msg = f"{self.path}: NumPy has no array for {self.dtype}"
            raise errors.InvalidInputError(msg, hint="lazy.load().float().numpy()") from error
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:  # noqa: ANN401 - of NumPy
        """Return :meth:`numpy`; ``np.asarray(lazy)`` calls this."""
        if copy is False:
            msg = f"{self.path} is read from the store: an array of it is always a copy"
            raise errors.InvalidInputError(msg, hint="np.asarray(lazy)")
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __dlpack__(self, **wishes: Any) -> object:  # noqa: ANN401 - of the protocol
        """Return the tensor for ``torch.as_tensor(lazy)`` and other libraries."""
        return torch.as_tensor(self.load(), device="cpu").detach().__dlpack__(**wishes)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device of the protocol: the CPU."""
        return (1, 0)

    def __getitem__(self, index: Index) -> Any:  # noqa: ANN401 - as for load
        """Return the part that `index` selects, as indexing the whole tensor would.

        Raises
        ------
        TensorIndexError
            The index is out of range, or of a kind that tensors do not take.
        CorruptTensorError
            A piece that is needed is damaged.
        CorruptObjectError
            The manifest's size does not fit dtype and shape.
        """
        keys = index if isinstance(index, tuple) else (index,)
        check_record(self._record)
        node: Any = self._leaf.node
        if self._leaf.kind not in {*SLICEABLE, "view"}:
            return self._applied(self.load(), keys)
        offsets, sizes, rest = self._box(keys)
        if self._leaf.kind == "view":
            skip = sum(map(operator.mul, offsets, node[5])) * ITEM_BYTES[self.dtype]
            part = [*node[:3], node[3] + skip, list(sizes), node[5]]
            return self._applied(self._load(part), rest)
        return self._applied(self._fetch(offsets, sizes), rest)

    def _applied(self, value: Any, keys: tuple[Any, ...]) -> Any:  # noqa: ANN401
        try:
            return value[keys] if keys else value
        except (IndexError, TypeError, ValueError) as error:
            msg = f"{self.path} of shape {list(self.shape)}: {error}"
            raise errors.TensorIndexError(msg) from error

    def _box(
        self, keys: tuple[Any, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
        """Return offsets and sizes of the box to read, and the rest of the index."""
        offsets, sizes = [0] * len(self.shape), [*self.shape]
        rest: list[Any] = []
        for place, (key, size) in enumerate(zip(keys, self.shape, strict=False)):
            if type(key) is int:
                if not -size <= key < size:
                    msg = f"{self.path}: index {key} is outside dimension {place} of size {size}"
                    raise errors.TensorIndexError(msg, hint=f"from {-size} to {size - 1}")
                offsets[place], sizes[place] = key % size, 1
                rest.append(0)
            elif isinstance(key, slice) and (key.step is None or key.step > 0):
                low, high, stride = key.indices(size)
                offsets[place], sizes[place] = low, max(low, high) - low
                rest.append(slice(0, sizes[place], stride))
            else:
                break
        return tuple(offsets), tuple(sizes), (*rest, *keys[len(rest) :])

    @operation("lazy")
    def _fetch(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """Return a box of the tensor, in its memory order; reads the pieces that hold any of it."""
        item = ITEM_BYTES[self._record.dtype]
        nbytes = math.prod(sizes) * item
        record = self._record.replace(shape=sizes, nbytes=nbytes, blocks=None, recipe=None)
        destination = Destination(record)
        order = record.order or range(len(sizes))
        stored = np.ndarray([sizes[dim] for dim in order], np.dtype(f"V{item}"), destination.view)
        out = stored.transpose(np.argsort(order))
        region = Region(content=self._content, index=self._leaf.index, offsets=offsets, out=out)
        repo = self._repo
        with naming_change(repo, self._info):
            read_regions(
                [region], backend=repo.load_backend, options=repo.options, rounding=to_bfloat16
            )
        del stored, out, region
        return destination.finish()
