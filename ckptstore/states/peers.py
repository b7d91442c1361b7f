"""Messages between the ranks of a process group that load together.

Ranks go on in steps. In each step every rank sends every other one a message of fixed size; then
those that sent messages of one kind exchange data whose sizes they know. A rank that fails says so
in its next step, whenever that is, and all raise its error: nobody waits for data of it. A rank
that is gone fails the messages of the others with it, each of which passes that on in one step
more.

Messages go from rank to rank, and not through collectives, because the error then names the rank.
They run in a thread of their own: Ctrl-C never hits in the middle of a step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from ckptstore import errors, limits
from ckptstore.backends.transfers import Threads
from ckptstore.errors import CkptStoreError, InvalidInputError, RankFailedError

Message = Mapping[str, Any]
Data = Mapping[int, torch.Tensor]
_Call: TypeAlias = "tuple[int, Callable[..., Any], torch.Tensor, int]"
"""Place of the peer, function of torch.distributed, tensor, tag."""

_MESSAGE_TAG: Final = 0x636B
_DATA_TAG: Final = 0x6370
_TEXT_CHARS: Final = 1500
"""Of an error; with a hint of a fifth it fits limits.RANK_MESSAGE_BYTES in any script."""
_UNPRINTED: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""Characters of which each takes six in JSON."""
FAILED: Final = "failed"
END: Final = "end"
"""Kinds of messages after which there is no further step."""


class Peers:
    """The ranks of a group during one load; places are their numbers in the group.

    Parameters
    ----------
    group
        All of its ranks must make one, at the same time. Nothing else may use the group meanwhile.

    Raises
    ------
    InvalidInputError
        It is no process group, or this process is not in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        given: object = group
        if not (dist.is_available() and isinstance(given, dist.ProcessGroup)):
            if dist.is_available() and given is dist.GroupMember.NON_GROUP_MEMBER:
                msg = "this rank is not in the group that the load was given"
                raise InvalidInputError(msg, hint="call the load only on the ranks of the group")
            msg = f"group is a process group of torch.distributed, not {given!r:.80}"
            raise InvalidInputError(msg, hint="group=torch.distributed.group.WORLD")
        self._group = group
        self.ranks = dist.get_process_group_ranks(group)
        """Global rank of each place; errors name these."""
        self.place = dist.get_rank(group)
        self._device = _device_of(group)
        self._lost: set[int] = set()
        self._over = len(self.ranks) == 1
        self._thread = Threads(1, "ckptstore-peers")

    @property
    def others(self) -> list[int]:
        """Places of the other ranks that are not lost."""
        mine = {self.place, *self._lost}
        return [place for place in range(len(self.ranks)) if place not in mine]

    def begin(
        self, message: Message, sends: Data | None = None, receives: Data | None = None
    ) -> Future[list[Message]]:
        """Begin a step; its result is what :meth:`step` returns and raises."""
        return self._thread.submit(self._step, message, sends or {}, receives or {})

    def step(
        self, message: Message, sends: Data | None = None, receives: Data | None = None
    ) -> list[Message]:
        """Exchange messages, and data of sizes that are known; return the messages by place.

        Raises
        ------
        RankFailedError
            A rank is gone, or failed with an error that is none of ckptstore's; names the rank.
        CkptStoreError
            A rank failed with this error; names the rank.
        InvalidInputError
            Data is due, and not all ranks sent a message of this kind.
        """
        return self.begin(message, sends, receives).result()

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks by place; raises as :meth:`step`."""
        told = self.step({"kind": "sizes", "size": len(data)})
        _check_alike(told)
        sizes, others = [int(one["size"]) for one in told], self.others
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _empty(0)
        found = {place: _empty(sizes[place]) for place in others}
        self.step({"kind": "gather"}, dict.fromkeys(others, mine), found)
        return [
            found[place].numpy().tobytes() if place in found else data
            for place in range(len(self.ranks))
        ]

    def fail(self, error: BaseException) -> BaseException:
        """Tell the other ranks that this one failed, unless all know; return what to raise here."""
        try:
            named = self._named(error)
        except Exception:  # noqa: BLE001 - an error that cannot be shown; the others must know
            named = RankFailedError(f"rank {self.ranks[self.place]}: {type(error).__name__}")
        if not self._over:
            self._thread.submit(self._tell_failure, named).result()
        return error if not isinstance(error, CkptStoreError) else named

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    # --- in the thread --------------------------------------------------------------------------

    def _step(self, message: Message, sends: Data, receives: Data) -> list[Message]:
        if len(self.ranks) == 1:
            return [message]
        if self._over:
            raise RankFailedError("the load has failed, and its ranks exchange nothing any more")
        told = self._swap(message, sends, receives)
        for place in sorted(told):
            if told[place].get("kind") == FAILED:
                self._over = True
                raise _rebuilt(told[place])
        if self._lost:
            gone = ", ".join(f"rank {self.ranks[place]}" for place in sorted(self._lost))
            msg = f"{gone} is gone, or did not answer within the timeout of the group"
            hint = "start the ranks again; the group is of no use any more"
            raise RankFailedError(msg, hint=hint)
        self._over = {one["kind"] for one in told.values()} == {END}
        if sends or receives:
            _check_alike(list(told.values()))
        return [told[place] for place in range(len(self.ranks))]

    def _tell_failure(self, error: CkptStoreError) -> None:
        """Take part in the step that the others expect, as the rank that failed."""
        if self._over:
            return
        self._over = True
        text = {
            "kind": FAILED,
            "error": _public(error),
            "hint": _UNPRINTED.sub("?", error.hint[: _TEXT_CHARS // 5]),
        }
        message = _UNPRINTED.sub("?", error.message[:_TEXT_CHARS])
        self._swap({**text, "message": message}, {}, {})

    def _swap(self, message: Message, sends: Data, receives: Data) -> dict[int, Message]:
        """Exchange with all that are not lost; note who is, and return the others' messages."""
        mine, others = _packed(message), self.others
        found = {place: _empty(limits.RANK_MESSAGE_BYTES) for place in others}
        sent = [(place, dist.isend, mine, _MESSAGE_TAG) for place in others]
        self._run([*sent, *((at, dist.irecv, one, _MESSAGE_TAG) for at, one in found.items())])
        told = {place: _unpacked(one) for place, one in found.items() if place not in self._lost}
        alike = {place for place, one in told.items() if one["kind"] == message["kind"]}
        calls: list[_Call] = [
            (place, call, data[place], _DATA_TAG)
            for call, data in ((dist.isend, sends), (dist.irecv, receives))
            for place in sorted(alike & data.keys())
            if data[place].numel()
        ]
        self._run(calls)
        told = {place: one for place, one in told.items() if place not in self._lost}
        return {**told, self.place: message}

    def _run(self, calls: list[_Call]) -> None:
        """Run calls at once, on the device that the group needs; wait for all of them."""
        if not calls:
            return
        if self._device.type != "cpu":
            self._run_staged(calls)
            return
        waiting = []
        for place, call, tensor, tag in calls:
            try:
                waiting.append((place, call(tensor, self.ranks[place], self._group, tag)))
            except RuntimeError:  # the connection is known to be closed
                self._lost.add(place)
        for place, work in waiting:
            try:
                work.wait()
            except RuntimeError:  # closed, or the timeout of the group
                self._lost.add(place)

    def _run_staged(self, calls: list[_Call]) -> None:
        """Run calls for a group that sends tensors of devices only."""
        staged = [tensor.to(self._device) for _, _, tensor, _ in calls]
        try:
            made = [
                dist.P2POp(call, there, self.ranks[place], self._group, tag)
                for (place, call, _, tag), there in zip(calls, staged, strict=True)
            ]
            for work in dist.batch_isend_irecv(made):
                work.wait()
            for (_, call, tensor, _), there in zip(calls, staged, strict=True):
                if call is dist.irecv:
                    tensor.copy_(there)
        except RuntimeError as error:
            self._over = True
            msg = f"the group failed in the exchange of rank {self.ranks[self.place]}: {error}"
            raise RankFailedError(msg[:_TEXT_CHARS]) from error

    def _named(self, error: BaseException) -> CkptStoreError:
        """Return an error that names this rank, of the same kind if it is ckptstore's."""
        rank = f"rank {self.ranks[self.place]}"
        if isinstance(error, CkptStoreError):
            if error.message.startswith("rank "):
                return error
            kind, text = type(error), f"{rank}: {error.message}"
            named = kind.__new__(kind)  # a kind of somebody else may want other arguments
            named.__dict__.update({**vars(error), "message": text})
            named.args = (text,)
            return named
        if isinstance(error, KeyboardInterrupt):
            return RankFailedError(f"{rank} was interrupted")
        return RankFailedError(f"{rank}: {type(error).__name__}: {error}")


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device whose tensors a group sends: the CPU if it can."""
    kinds = [one.partition(":")[0] for one in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _empty(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device="cpu")


def _packed(message: Message) -> torch.Tensor:
    data = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    assert len(data) <= limits.RANK_MESSAGE_BYTES, message  # noqa: S101  # texts are cut before
    return torch.frombuffer(bytearray(data.ljust(limits.RANK_MESSAGE_BYTES)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Message:
    message: Message = json.loads(data.numpy().tobytes())
    return message


def _public(error: CkptStoreError) -> str:
    """Return the name of the nearest of ckptstore's errors, which the other ranks have."""
    known = vars(errors)
    names: list[str] = [
        kind.__name__ for kind in type(error).__mro__ if known.get(kind.__name__) is kind
    ]
    return names[0]


def _rebuilt(told: Message) -> CkptStoreError:
    """Return the error of another rank."""
    kind = getattr(errors, str(told["error"]), RankFailedError)
    made: CkptStoreError = kind(told["message"], hint=told["hint"])
    return made


def _check_alike(told: Sequence[Message]) -> None:
    """Raise unless all ranks sent messages of one kind."""
    if len({one["kind"] for one in told}) > 1:
        msg = "the ranks of the group do different things"
        raise InvalidInputError(msg, hint="let all ranks make the same calls in the same order")
