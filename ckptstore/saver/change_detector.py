"""Detects tensors that were modified while they were being staged.

Torch counts the changes of each tensor that are made in place. What is not counted (a change
through ``.data``, through NumPy, by a kernel of someone's own) is noticed by a few bytes of each
tensor, as they were at the call: an optimizer that changes a tensor changes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore import limits
from ckptstore.errors import TornStateError
from ckptstore.format.paths import path_text
from ckptstore.tensors.tensor_bytes import SourceTensor


def counted(source: SourceTensor) -> bool:
    """Return whether torch counts the changes of a tensor; of NumPy's arrays nobody does."""
    return bool(source.watched) and not any(one.is_inference() for one in source.watched)


class ChangeDetector:
    """Notes what a state is at this moment.

    Parameters
    ----------
    samples
        Look at some bytes too, no more than 64 a tensor: for a state that is not staged at once.
    """

    def __init__(self, sources: Sequence[SourceTensor], *, samples: bool) -> None:
        self._sources = sources
        self._counters = [_counters(source) for source in sources]
        self._samples = [_sample_of(source) if samples else None for source in sources]

    def check(self, memory: memoryview, offsets: Sequence[int]) -> None:
        """Compare with what was staged since.

        Parameters
        ----------
        memory
            Where the state was copied to.
        offsets
            Of each tensor in it.

        Raises
        ------
        TornStateError
            A tensor was changed meanwhile; it is named.
        """
        parts = zip(self._sources, self._counters, self._samples, offsets, strict=True)
        for source, counters, sample, offset in parts:
            same = counters == _counters(source)
            if same and sample is not None:
                same = sample == _sample(memory[offset : offset + source.nbytes])
            if not same:
                name = path_text(source.paths[0])
                msg = f"{name!r} was changed while it was being staged; nothing was saved"
                hint = "call wait_staged() before optimizer.step(), and save from one thread"
                raise TornStateError(msg, hint=hint)


def _counters(source: SourceTensor) -> tuple[int, ...]:
    return tuple(one._version for one in source.watched if not one.is_inference())


def _sample_of(source: SourceTensor) -> bytes | None:
    view = source.payload.view()
    return None if view is None else _sample(view)


def _sample(view: memoryview) -> bytes:
    """Return some bytes at the beginning, the end and between."""
    last = max(0, len(view) - limits.WITNESS_BYTES)
    steps = limits.WITNESS_PLACES - 1
    places = [last * step // steps for step in range(limits.WITNESS_PLACES)]
    return b"".join([view[place : place + limits.WITNESS_BYTES] for place in places])
