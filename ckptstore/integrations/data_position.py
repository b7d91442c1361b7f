"""Positions in the data, of every rank, as one value of a version; see docs/howto/data-position.md.

::

    loader = ElasticLoader(make_loader)  # make_loader(rank, ranks) returns the loader of a rank
    if run.head is not None:
        loader.load_state_dict(run.load()["data"])
    for batch in loader: ...
    data = loader.state_dict()  # on all ranks, also if only rank 0 saves

The rule: N ranks read N streams of batches, which have an order: batch 0 of each stream, then batch
1 of each. M ranks that resume in the middle read the same N streams, and take what is left in this
order, in turns. So each batch is seen once, and a step of the training that takes N batches sees
what it would have seen. From the next epoch on there are M streams.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from torch.distributed import ProcessGroup
from torch.utils.data import IterableDataset

from ckptstore.errors import InvalidInputError, StateError
from ckptstore.integrations.ranks import gathered, place

__all__ = ["ElasticLoader", "per_rank", "this_rank"]

_NONE: Final = object()


def per_rank(value: object) -> dict[str, Any]:
    """Return the values of all ranks: ``{"rank 0": ...}``. All ranks call it, and get the same."""
    return {f"rank {rank}": one for rank, one in enumerate(gathered(value))}


def this_rank(values: Mapping[str, Any]) -> Any:  # as it was saved
    """Return the value of this rank, of what :func:`per_rank` returned when it was saved.

    Raises
    ------
    StateError
        Another number of ranks saved it: nobody knows how to divide it again.
    """
    rank, ranks = place()
    if len(values) != ranks or f"rank {rank}" not in values:
        msg = f"the position in the data is of {len(values)} ranks, and this training has {ranks}"
        hint = f"resume it at {len(values)}, begin the epoch again, or use an ElasticLoader"
        raise StateError(msg, hint=hint)
    return values[f"rank {rank}"]


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Stream(msgspec.Struct, frozen=True, kw_only=True):
    """The saved position of a stream; not beyond the first batch that is left of it."""

    at: _Count
    """Number of batches before it."""
    ended: bool
    state: Any


class _Position(msgspec.Struct, frozen=True, kw_only=True):
    """The saved position of a pass."""

    epoch: _Count
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    """Number of streams of the pass."""
    taken: _Count = 0
    """Number of batches from the first one on, in the order of the pass, that were all taken."""
    ahead: list[_Count] = []
    """Later batches that were taken, by ranks that were ahead of others; sorted."""
    done: bool = False
    streams: dict[str, _Stream] = {}

    def number(self, index: int) -> int:
        """Return the number of a batch in the pass, by its place among those that are left."""
        number = self.taken + index
        for one in self.ahead:
            number += one <= number
        return number

    def next(self, ranks: int) -> _Position:
        """Return the beginning of the next pass; at as many ranks it goes on with generators."""
        streams = self.streams if self.done and ranks == self.ranks else {}
        kept = {key: _Stream(at=0, ended=False, state=one.state) for key, one in streams.items()}
        return _Position(epoch=self.epoch + 1, ranks=ranks, streams=kept)


@dataclass(slots=True)
class _Opened:
    """A stream that this rank reads."""

    loader: Any
    batches: Iterator[Any]
    at: int
    settled: int
    """From here on its state is that of its position; before, the one that was loaded counts."""
    ended: bool = False


class _Part(NamedTuple):
    """Progress of a rank in a pass."""

    epoch: int
    taken: int
    """Places among the batches that were left, each that of one of its batches."""
    finished: bool
    streams: dict[int, _Stream]


def _merged(begun: _Position, parts: Sequence[_Part]) -> _Position:
    """Return the position of a pass from what each rank did since it was begun or resumed."""
    ranks, epochs = len(parts), sorted({one.epoch for one in parts})
    if len(epochs) > 1:
        msg = f"some ranks are in epoch {epochs[0]} of the data, others in epoch {epochs[-1]}"
        raise StateError(msg, hint="save where all ranks are in the same epoch")
    going = [one.taken for one in parts if not one.finished]
    taken, ahead = begun.taken, begun.ahead
    if going:
        # Nothing is left for a rank that has finished, however far the others go.
        most = max(one.taken for one in parts)
        counts = [most if one.finished else one.taken for one in parts]
        places = range(min(going) * ranks, most * ranks)
        taken = begun.number(places.start)
        late = {begun.number(at) for at in places if at // ranks < counts[at % ranks]}
        ahead = sorted(late | {one for one in begun.ahead if one > taken})
    streams: dict[str, _Stream] = {}
    # At the end only states of the ends of streams count: where each rank has read its own to that.
    if not (going or begun.done or (ranks == begun.ranks and not (taken % ranks or ahead))):
        return msgspec.structs.replace(begun, done=True, streams=streams)
    for stream in range(begun.ranks):
        found = [one.streams[stream] for one in parts if stream in one.streams]
        if (going or begun.done) and str(stream) in begun.streams:
            found.append(begun.streams[str(stream)])
        left = max(0, -((stream - taken) // begun.ranks)) if going else sys.maxsize
        fitting = [one for one in found if one.at <= left]
        if fitting:
            streams[str(stream)] = max(fitting, key=lambda one: (one.at, one.ended))
    words = {"taken": taken, "ahead": ahead, "done": not going, "streams": streams}
    return msgspec.structs.replace(begun, **words)


class ElasticLoader:
    """A loader that resumes at any number of ranks: each batch of the epoch is seen once.

    All ranks iterate over it, once for each epoch. Other than by a resume, a pass always begins at
    the beginning. It has ``state_dict`` and ``load_state_dict``, so that Accelerate, Lightning and
    others save it with the rest.

    Parameters
    ----------
    make
        Called with a rank and the number of ranks, returns the loader of that rank, which must not
        depend on the rank that calls. It has ``state_dict`` and ``load_state_dict``. After a resume
        at another number of ranks it is asked for loaders of the ranks that saved. The loader, its
        sampler and its dataset get each epoch by their ``set_epoch``, if they have one.
    drop_last
        After a resume at another number of ranks, leave out the last batches of the epoch that not
        all ranks would get: fewer than there are ranks. Needs loaders of the same length.
    group
        The ranks that divide the data, such as ``mesh["dp"].get_group()``; None for all. Ranks of a
        tensor-parallel model that are to get the same batches are in different groups.

    Raises
    ------
    InvalidInputError
        `make` is not a function.
    """

    def __init__(
        self,
        make: Callable[[int, int], Any],
        *,
        drop_last: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        given: object = make
        if not callable(given):
            msg = f"make is a function of rank and ranks, not {given!r:.80}"
            raise InvalidInputError(msg, hint="such as lambda rank, ranks: StatefulDataLoader(...)")
        self._make = make
        self._drop_last = drop_last
        self._group = group
        self._loaders: dict[tuple[int, int], Any] = {}
        self._from: _Position | None = None
        self._resumes = False
        self._start(None)

    def _start(self, position: _Position | None) -> None:
        self._from = position
        self._opened: dict[int, _Opened] = {}
        self._taken = 0
        self._finished = position is not None and position.done

    @property
    def epoch(self) -> int:
        """The epoch that goes on, or that the next iteration begins; from 0 on."""
        return 0 if self._from is None else self._from.epoch + self._finished

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on all ranks, which must all call it.

        Raises
        ------
        StateError
            Some ranks have begun the next epoch, others not.
        """
        streams = {
            stream: _Stream(at=one.at, ended=one.ended, state=one.loader.state_dict())
            for stream, one in self._opened.items()
            if self._finished or one.at >= one.settled
        }
        epoch = 0 if self._from is None else self._from.epoch
        parts = gathered(_Part(epoch, self._taken, self._finished, streams), self._group)
        begun = self._from or _Position(epoch=0, ranks=len(parts))
        found = msgspec.structs.asdict(_merged(begun, parts))
        saved = {name: msgspec.structs.asdict(one) for name, one in found["streams"].items()}
        return {**found, "streams": saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at a saved position with the next iteration. All ranks call it.

        Raises
        ------
        StateError
            It is not from an ElasticLoader.
        """
        try:
            position = msgspec.convert(state_dict, _Position)
        except msgspec.ValidationError as error:
            msg = f"it is no position of an ElasticLoader: {error}"
            raise StateError(msg, hint="load what ElasticLoader.state_dict() returned") from error
        self._loaders.clear()
        self._start(position)
        self._resumes = True

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        length: int = len(self._loader(*place(self._group)))
        return length

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of the loaded epoch, or those of the next one."""
        rank, ranks = place(self._group)
        begun = self._from
        if begun is None:
            begun = _Position(epoch=0, ranks=ranks)
            self._start(begun)
        elif begun.done or not self._resumes:
            begun = begun.next(ranks)
            self._start(begun)
        self._resumes = False
        opened, most = self._opened, self._most(begun, rank, ranks)
        # From here on the streams of a rank come in turns of at most this length.
        turn = begun.ranks + (max(begun.ahead) - begun.taken if begun.ahead else 0)
        index = given = 0
        while index - self._taken <= turn and given != most:
            at, stream = divmod(begun.number(index * ranks + rank), begun.ranks)
            batch = self._take(begun, stream, at)
            index += 1
            if batch is _NONE:
                continue
            self._taken, given = index, given + 1
            self._finished = given == most or not self._more(begun, rank, ranks, turn)
            yield batch
            if opened is not self._opened:
                return  # another iteration has begun
        self._finished = True

    def _more(self, begun: _Position, rank: int, ranks: int, turn: int) -> bool:
        """Return whether batches may be left for this rank; False only if lengths say so."""
        for index in range(self._taken, self._taken + turn + 1):
            at, stream = divmod(begun.number(index * ranks + rank), begun.ranks)
            loader = self._loader(stream, begun.ranks)
            estimated = isinstance(getattr(loader, "dataset", loader), IterableDataset)
            try:
                if estimated or at < len(loader):
                    return True
            except TypeError:  # it has none
                return True
        return False

    def _most(self, begun: _Position, rank: int, ranks: int) -> int:
        """Return the number of batches that each rank gets; -1 if it is not bounded."""
        if not self._drop_last:
            return -1
        whole = len(self._loader(rank % begun.ranks, begun.ranks)) * begun.ranks
        return (whole - begun.taken - len(begun.ahead)) // ranks

    def _take(self, begun: _Position, stream: int, at: int) -> Any:  # a batch
        """Return a batch of a stream, after passing over those before it."""
        one = self._opened.get(stream)
        if one is None:
            one = self._opened[stream] = self._open(begun, stream)
        batch = _NONE
        while one.at <= at and not one.ended:
            batch = next(one.batches, _NONE)
            one.ended = batch is _NONE
            one.at += not one.ended
        return batch

    def _open(self, begun: _Position, stream: int) -> _Opened:
        saved = begun.streams.get(str(stream))
        loader = self._loader(stream, begun.ranks)
        for one in (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(begun.epoch)
        at, settled = 0, 0
        if saved is not None:
            loader.load_state_dict(saved.state)
            # Workers of torchdata have no state of datasets' streams before their first batch.
            at, settled = saved.at, saved.at + getattr(loader, "num_workers", 0)
            if saved.ended:
                return _Opened(loader, iter(()), at, at, ended=True)
        batches = iter(loader)
        if at == 0:  # with the state of the end of a pass, some loaders end once more
            first = next(batches, _NONE)
            batches = iter(loader) if first is _NONE else chain([first], batches)
        return _Opened(loader, batches, at, settled)

    def _loader(self, stream: int, ranks: int) -> Any:  # of any library
        made = self._loaders.get((stream, ranks))
        if made is None:
            made = self._make(stream, ranks)
            if not (hasattr(made, "state_dict") and hasattr(made, "load_state_dict")):
                msg = f"the loader of rank {stream}, a {type(made).__name__}, has no state_dict"
                raise InvalidInputError(msg, hint="use torchdata's StatefulDataLoader")
            self._loaders = {key: one for key, one in self._loaders.items() if key[1] == ranks}
            self._loaders[stream, ranks] = made
        return made
