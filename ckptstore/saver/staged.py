"""A staged state: what is in an arena, and the check that it is still what was put there.

Needs no torch: a child process that writes it imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptstore.byte_copies import copy_bytes
from ckptstore.errors import TornStateError
from ckptstore.hashing import xxh3_64
from ckptstore.objects.sources import Payload, PieceSource

Digests = Sequence[Sequence[int]]
"""Per tensor: XXH3-64 of each of its pieces, taken right after it was staged."""


class StagedTensor(NamedTuple):
    """Where one tensor lies in an arena. A tuple: thousands of them are pickled in the call."""

    name: str
    """The path that errors name it by."""
    dtype: str
    nbytes: int
    itemsize: int
    row_bytes: int
    offset: int
    """Of its first byte in the arena."""
    piece_bytes: int
    """Length of its pieces, in bytes."""


class StagedBytes:
    """The bytes of a staged tensor; each piece is compared with its digest as it is read."""

    def __init__(
        self,
        memory: memoryview,
        tensor: StagedTensor,
        digests: Sequence[int] | None,
        check: Callable[[], None],
    ) -> None:
        self._memory = memory[tensor.offset : tensor.offset + tensor.nbytes]
        self._tensor = tensor
        self._digests = digests
        self._check = check

    @property
    def piece_bytes(self) -> int:
        """Return the length of its pieces."""
        return self._tensor.piece_bytes

    def unguarded(self) -> Payload:
        """Return the same bytes for any range; what is made of them is compared by its maker."""
        return _Unguarded(self._memory, self._check)

    def view(self) -> memoryview | None:
        """Return None: the bytes are copied first and compared then, so that they stay still."""
        return None

    def copy_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the piece that begins at `start`.

        Raises
        ------
        TornStateError
            The bytes are not what was staged.
        OperationCancelledError
            The save was cancelled.
        """
        self._check()
        copy_bytes(out, self._memory[start : start + len(out)])
        digests = self._digests
        if digests is not None and xxh3_64(out) != digests[start // self._tensor.piece_bytes]:
            msg = f"{self._tensor.name!r} was changed in memory after it had been staged"
            hint = "nothing was saved; save again, and look for what writes to memory it has freed"
            raise TornStateError(msg, hint=hint)


class _Unguarded:
    """The bytes of a staged tensor, as they are."""

    def __init__(self, memory: memoryview, check: Callable[[], None]) -> None:
        self._memory = memory
        self._check = check

    def view(self) -> memoryview | None:
        self._check()
        return self._memory

    def copy_into(self, start: int, out: memoryview) -> None:
        self._check()
        out[:] = self._memory[start : start + len(out)]


def sources_in(
    memory: memoryview,
    tensors: Sequence[StagedTensor],
    digests: Digests | None,
    check: Callable[[], None],
) -> list[PieceSource]:
    """Return the staged tensors of an arena as sources of a save.

    Parameters
    ----------
    digests
        None if nobody lived to take them: then nothing is compared.
    check
        Called before each piece is read; what it raises ends the save.
    """
    return [
        PieceSource(
            nbytes=tensor.nbytes,
            dtype=tensor.dtype,
            itemsize=tensor.itemsize,
            row_bytes=tensor.row_bytes,
            payload=StagedBytes(memory, tensor, None if digests is None else digests[at], check),
        )
        for at, tensor in enumerate(tensors)
    ]
