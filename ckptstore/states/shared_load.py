"""Loads that the ranks of a group make together: each chunk is read by one of them.

Ranks exchange pieces of tensors as they are before codecs and after recipes: decoded, and named by
the digest of their bytes, which every rank that receives one compares. So codecs, deltas,
encryption and replicas concern only the rank that reads, and quantized tensors travel small.

For each call, ranks first agree on the chunks that at least two of them want. These are cut into
blocks; the rank that reads a block is one that wants it. Blocks are sent in rounds of a fourth
of ``host_bytes``; while one round is on its way, the one before is delivered, and the next blocks
are read. All ranks compute the same plan.
"""

from __future__ import annotations

import contextlib
import pickle
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.backends.base import Backend
from ckptstore.backends.transfers import FillingThreads
from ckptstore.checkpoint.content import Content, ReadPieces
from ckptstore.config import Options
from ckptstore.errors import CorruptTensorError, InvalidInputError
from ckptstore.events import Counted, ProgressCallback, silent
from ckptstore.format.manifest import PieceTable
from ckptstore.hashing import blake3_digest, blake3_of
from ckptstore.objects.piece_reader import read_pieces
from ckptstore.objects.plan import ReadItem
from ckptstore.states.peers import END, Message, Peers
from ckptstore.tensors.tensor_bytes import memory_of, tensor_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Chunks = npt.NDArray[np.int64]
"""Numbers of chunks, ascending."""

_READ: Final = "read"
_SETTLE: Final = "settle"
_BLOCK_SHARE: Final = 16
_ROUND_SHARE: Final = 4
"""Parts of ``host_bytes`` that a block and a round may take: three blocks are read ahead, two
rounds are in memory, and the threads that read have a fourth."""
_AHEAD: Final = 3


class SharedLoad:
    """One load by all ranks of a group; a context manager, which all of them enter.

    If any rank leaves the block with an error, all ranks leave it with one; the same holds for the
    end of the block, so that a load has succeeded on every rank or on none.

    Parameters
    ----------
    group
        A process group of torch.distributed.
    alike
        All ranks load the same tensors; it is an error if they do not.
    """

    def __init__(self, group: ProcessGroup, *, alike: bool) -> None:
        self.peers: Peers = Peers(group)
        self._alike = alike
        self._parts: _SharedPieces | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is None:
                try:
                    self.settle(END)
                except BaseException as late:
                    self._fail(late)
                    raise
            else:
                self._fail(error)
        finally:
            self.peers.close()

    def _fail(self, error: BaseException) -> None:
        raised = self.peers.fail(error)
        if raised is not error:
            raise raised from error

    def first(self, make: Callable[[], T]) -> T:
        """Return on every rank what a function returns on the first one of the group.

        The value travels as a pickle, between processes of one training.
        """
        mine = pickle.dumps(make()) if self.peers.place == 0 else b""
        value: T = pickle.loads(self.peers.gather(mine)[0])  # noqa: S301 - see above
        return value

    def shared(self, content: Content) -> Content:
        """Return a version's content whose pieces are read by all ranks together.

        Raises
        ------
        InvalidInputError
            The ranks have different manifests: those of other versions, or of a replica.
        """
        table = content.manifest.pieces
        columns = (table.ids, table.raw, table.pack, table.offset, table.inner)
        digest = blake3_of(
            [*(_bytes(column) for column in columns), "".join(table.packs).encode()]
        ).hex()
        told = self.peers.step({"kind": "open", "table": digest})
        self._check_equal(told, "kind", "do different things")
        self._check_equal(told, "table", "see different versions, or different copies of one")
        if len(told) == 1:
            return content
        self._parts = _SharedPieces(self, content)
        return replace(content, read=self._parts)

    def settle(self, kind: str = _SETTLE) -> None:
        """Wait until all ranks have called this, and help those that still read until then."""
        while True:
            told = self.peers.step({"kind": kind})
            if not any(one["kind"] == _READ for one in told):
                self._check_equal(told, "kind", "do different things")
                return
            self._check_alike(told)
            assert self._parts is not None  # noqa: S101  # others read: all have opened a version
            self._parts.help(told)

    def _check_alike(self, told: Sequence[Message]) -> None:
        """Raise unless ranks read, or wait; and read the same, where that is due."""
        if self._alike:
            self._check_equal(told, "want", "load different tensors, or into different places")
        elif not all(one["kind"] in {_READ, _SETTLE, END} for one in told):
            self._check_equal(told, "kind", "do different things")

    def _check_equal(self, told: Sequence[Message], name: str, what: str) -> None:
        values = [one.get(name) for one in told]
        for place, value in enumerate(values):
            if value != values[0]:
                ranks = self.peers.ranks
                msg = f"rank {ranks[place]} and rank {ranks[0]} of the group {what}"
                hint = "give all ranks the same version, selection, target and options"
                raise InvalidInputError(msg, hint=hint)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Chunks that one rank reads and sends to others."""

    owner: int
    members: tuple[int, ...]
    """Places of the ranks that want them, the owner among them."""
    chunks: Chunks
    nbytes: int


class _SharedPieces:
    """Reader of pieces, together with the other ranks; see :class:`ReadPieces`."""

    def __init__(self, load: SharedLoad, content: Content) -> None:
        self._load = load
        self._peers = load.peers
        self._read_bytes = [0] * len(load.peers.ranks)
        """Given to each rank to read so far."""
        self._spare: list[torch.Tensor] = []
        self._content = content
        self._inner: ReadPieces = content.read or read_pieces
        table = content.manifest.pieces
        order = np.lexsort((table.inner, table.offset, table.pack))
        pack, offset, inner = table.pack[order], table.offset[order], table.inner[order]
        begins = np.ones(len(order), bool)
        begins[1:] = (pack[1:] != pack[:-1]) | (offset[1:] != offset[:-1])
        differs = begins.copy()
        differs[1:] |= (inner[1:] != inner[:-1]) | (table.raw[order[1:]] != table.raw[order[:-1]])
        differs[1:] |= (table.ids[order[1:]] != table.ids[order[:-1]]).any(axis=1)
        numbers = begins.cumsum() - 1
        self._chunk_of = np.empty(len(order), np.int64)
        self._chunk_of[order] = numbers
        self._rows = order[differs]
        """Rows of different pieces, chunk by chunk."""
        self._first = np.searchsorted(numbers[differs], np.arange(int(begins.sum()) + 1))
        """The first of these of each chunk."""
        raw = table.raw[self._rows].astype(np.int64)
        self._nbytes = np.add.reduceat(raw, self._first[:-1]) if len(raw) else raw
        self._same = np.empty(len(order), np.int64)
        self._same[order] = self._rows[differs.cumsum() - 1]
        """For each row, the one of these with the same piece at the same place."""

    def __call__(
        self,
        table: PieceTable,
        items: Sequence[ReadItem],
        *,
        backend: Backend,
        options: Options,
        progress: ProgressCallback,
    ) -> None:
        """Read pieces; as :func:`ckptstore.objects.piece_reader.read_pieces`."""
        rows = np.fromiter((item.row for item in items), np.int64, len(items))
        wanted = np.unique(self._chunk_of[rows])
        message = {
            "kind": _READ,
            "want": blake3_digest(_bytes(wanted)).hex(),
            "room": options.host_bytes,
        }
        told = self._peers.step(message)
        self._load._check_alike(told)
        rounds, shared = self._plan(told, wanted)
        run = _Run(
            pieces=self,
            by_row={},
            backend=backend,
            options=replace(options, host_bytes=max(1, options.host_bytes // _ROUND_SHARE // 2)),
            count=Counted(progress, "read", sum(int(table.raw[item.row]) for item in items)),
        )
        alone: list[ReadItem] = []
        for item, chunk in zip(items, self._chunk_of[rows].tolist(), strict=True):
            if chunk in shared:
                run.by_row.setdefault(int(self._same[item.row]), []).append(item)
            else:
                alone.append(item)
        run.exchange(rounds)
        if alone:
            rest = run.count.beyond()
            self._inner(table, alone, backend=backend, options=options, progress=rest)

    def help(self, told: Sequence[Message]) -> None:
        """Take part in a call of other ranks, as one that wants nothing."""
        rounds, _ = self._plan(told, np.zeros(0, np.int64))
        for _ in rounds:
            self._peers.step({"kind": "round"})

    def _plan(
        self, told: Sequence[Message], wanted: Chunks
    ) -> tuple[list[list[_Block]], frozenset[int]]:
        """Return the rounds of a call, and the chunks that are exchanged in them."""
        room = min(int(one["room"]) for one in told if one["kind"] == _READ)
        places = tuple(range(len(told)))
        if len({one.get("want") for one in told}) == 1:
            groups = [(places, wanted)]
        else:
            mask = np.zeros(len(self._nbytes), np.uint8)
            mask[wanted] = 1
            packed = self._peers.gather(np.packbits(mask).tobytes())
            groups = list(_groups([np.frombuffer(one, np.uint8) for one in packed], len(mask)))
        blocks = self._blocks(groups, room)
        rounds: list[list[_Block]] = []
        filled = 0
        for block in blocks:
            taken = {one.owner for one in rounds[-1]} if rounds else {block.owner}
            if block.owner in taken or filled + block.nbytes > room // _ROUND_SHARE:
                rounds.append([])
                filled = 0
            rounds[-1].append(block)
            filled += block.nbytes
        mine = [c for members, c in groups if self._peers.place in members]
        return rounds, frozenset(np.concatenate(mine).tolist()) if mine else frozenset()

    def _blocks(self, groups: Sequence[tuple[tuple[int, ...], Chunks]], room: int) -> list[_Block]:
        """Cut the chunks of each group of ranks into blocks, and give each to one of its ranks."""
        total = sum(int(self._nbytes[chunks].sum()) for _, chunks in groups)
        load = self._read_bytes
        size = max(1, min(room // _BLOCK_SHARE, -(-total // len(load))))
        found = []
        for members, chunks in groups:
            ends = self._nbytes[chunks].cumsum()
            cuts = np.flatnonzero(np.diff((ends - self._nbytes[chunks]) // size)) + 1
            for part in np.split(chunks, cuts) if len(chunks) else ():
                nbytes = int(self._nbytes[part].sum())
                owner = min(members, key=lambda place: (load[place], place))
                load[owner] += nbytes
                found.append(_Block(owner, members, part, nbytes))
        return found

    def places(self, block: _Block) -> Iterator[tuple[int, int, int]]:
        """Yield each row of a block with begin and end of its piece in the block's bytes."""
        at, raw = 0, self._content.manifest.pieces.raw
        for chunk in block.chunks.tolist():
            for row in self._rows[self._first[chunk] : self._first[chunk + 1]].tolist():
                end = at + int(raw[row])
                yield row, at, end
                at = end

    def read(self, block: _Block, backend: Backend, options: Options) -> torch.Tensor:
        """Return the bytes of a block, from the storage, checked."""
        memory = self.take(block)
        view = memory_of(memory.untyped_storage(), 0, block.nbytes)
        manifest = self._content.manifest
        items = [
            ReadItem(row=row, out=view[at:end], label=self.label(row))
            for row, at, end in self.places(block)
        ]
        self._inner(manifest.pieces, items, backend=backend, options=options, progress=silent)
        return memory

    def take(self, block: _Block) -> torch.Tensor:
        """Return memory for a block, such as one before had: fresh memory costs page faults."""
        with contextlib.suppress(IndexError):
            memory = self._spare.pop()
            if memory.untyped_storage().nbytes() >= block.nbytes:
                return tensor_over(memory.untyped_storage(), torch.uint8, 0, (block.nbytes,), (1,))
        return torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")

    def give_back(self, blocks: Iterable[torch.Tensor]) -> None:
        """Take back memory of blocks that were delivered."""
        self._spare += blocks

    def label(self, row: int) -> str:
        """Return the path of the tensor of a piece."""
        return self._content.labels[bisect_right(self._content.manifest.first, row) - 1]

    def check(self, row: int, piece: memoryview, block: _Block) -> None:
        """Compare a piece that another rank sent with its id.

        Raises
        ------
        CorruptTensorError
            They differ.
        """
        if blake3_digest(piece) != self._content.manifest.pieces.ids[row].tobytes():
            sender = self._peers.ranks[block.owner]
            msg = f"tensor {self.label(row)}: a piece that rank {sender} sent arrived damaged"
            raise CorruptTensorError(msg, hint="load again; look at the network of the ranks")


@dataclass(slots=True, kw_only=True)
class _Run:
    """The exchange of one call."""

    pieces: _SharedPieces
    by_row: dict[int, list[ReadItem]]
    """Items of shared chunks, by the first row of the same piece."""
    backend: Backend
    options: Options
    count: Counted

    def exchange(self, rounds: Sequence[Sequence[_Block]]) -> None:
        """Read own blocks, send them, receive those of others, and deliver all."""
        peers = self.pieces._peers
        own = deque(one for blocks in rounds for one in blocks if one.owner == peers.place)
        reading: deque[Future[torch.Tensor]] = deque()
        before: tuple[Future[list[Message]], dict[_Block, torch.Tensor]] | None = None
        with (
            FillingThreads(2, "ckptstore-ahead") as ahead,
            FillingThreads(self.options.workers, "ckptstore-deliver") as pool,
        ):
            for blocks in rounds:
                while own and len(reading) < _AHEAD:
                    args = (own.popleft(), self.backend, self.options)
                    reading.append(ahead.submit(self.pieces.read, *args))
                memory = {}
                for block in blocks:
                    if block.owner == peers.place:
                        memory[block] = reading.popleft().result()
                    elif peers.place in block.members:
                        memory[block] = self.pieces.take(block)
                if before is not None:
                    before[0].result()
                step = peers.begin({"kind": "round"}, *_tensors(memory, peers.place))
                if before is not None:
                    self._deliver(before[1], pool)
                before = step, memory
            if before is not None:
                before[0].result()
                self._deliver(before[1], pool)

    def _deliver(self, blocks: Mapping[_Block, torch.Tensor], pool: FillingThreads) -> None:
        """Check what arrived, and bring it to where it is wanted."""
        place = self.pieces._peers.place

        def one(work: tuple[_Block, memoryview, list[ReadItem]]) -> None:
            """Check a piece, and copy it to all its places."""
            block, piece, items = work
            if block.owner != place:
                self.pieces.check(items[0].row, piece, block)
            for item in items:
                if item.out is not None:
                    np.copyto(np.frombuffer(item.out, np.uint8), np.frombuffer(piece, np.uint8))
                for take in item.then:
                    take(piece)

        works = []
        for block, memory in blocks.items():
            view = memory_of(memory.untyped_storage(), 0, block.nbytes)
            for row, at, end in self.pieces.places(block):
                if row in self.by_row:
                    works.append((block, view[at:end], self.by_row[row]))
        for _ in pool.map(one, works):
            pass
        self.count.add(sum(len(piece) * len(items) for _, piece, items in works))
        self.pieces.give_back(blocks.values())


def _groups(
    packed: Sequence[npt.NDArray[np.uint8]], count: int
) -> Iterator[tuple[tuple[int, ...], Chunks]]:
    """Yield the chunks that the same two or more ranks want, with the places of these."""
    wanting = np.zeros(count, np.int64)
    for one in packed:
        wanting += np.unpackbits(one, count=count)
    shared = np.flatnonzero(wanting > 1)
    bits = np.stack([np.unpackbits(one, count=count)[shared] for one in packed])
    patterns, which = np.unique(bits, axis=1, return_inverse=True)
    for number, pattern in enumerate(patterns.T):
        yield tuple(np.flatnonzero(pattern).tolist()), shared[which.ravel() == number]


def _tensors(
    blocks: Mapping[_Block, torch.Tensor], place: int
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Return what a rank sends in a round, and receives, by peer."""
    sends: dict[int, torch.Tensor] = {}
    receives: dict[int, torch.Tensor] = {}
    for block, memory in blocks.items():
        if block.owner == place:
            sends.update(dict.fromkeys((p for p in block.members if p != place), memory))
        else:
            receives[block.owner] = memory
    return sends, receives


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
