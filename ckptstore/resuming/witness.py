"""The witness of a training: what it was at a save and for a few steps after it.

It is kept with the version, as the entry ``witness`` of its metadata. A process that resumes the
version compares itself with it as it goes, and says whether it goes on as the saved one did.
"""

from __future__ import annotations

import logging
import threading
import uuid
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Self, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ckptstore import errors
from ckptstore.argument_checks import check_between, integer
from ckptstore.backends.transfers import start_thread
from ckptstore.limits import KIB
from ckptstore.resuming import comparison
from ckptstore.resuming.comparison import GRADIENTS, MODES, SCALARS, Leaf, Moment, ResumeReport
from ckptstore.store import resume_check
from ckptstore.store.run import Run

_log = logging.getLogger("ckptstore")

_ENTRY: Final = "witness"
_RESULT: Final = "resumed"
_DATA: Final = "the data"
# Digests of a rank at the save, and of each step after it. Source: 3 KB in the log for one rank.
_ENTRIES_MAX: Final = 256
_STEP_ENTRIES_MAX: Final = 32
# Bytes of a witness in the metadata; of more ranks than fit none but the first ones are compared.
# Source: a quarter of METADATA_BYTES_MAX.
_BYTES_MAX: Final = 64 * KIB
_RAW_BYTES_MAX: Final = 64 * _BYTES_MAX
"""Bytes of a witness after decompression."""
_STEPS_MAX: Final = 100
# Seconds between two looks whether a version in the background is there, and for how many of them.
_POLL_S: Final = 1.0
_POLLS_MAX: Final = 3600
_POLLS_CLOSING: Final = 60
"""After close(), while this store has no save under way: another rank may commit it."""
_FAILURE_CHARS: Final = 1500

T = TypeVar("T")
_Moments = list[list[Moment]]
_Figure = float | torch.Tensor | None
"""By steps after the save, then by rank."""


class _Stored(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A witness as it is stored."""

    token: str
    """Tells the version that it belongs to from others."""
    ranks: int
    moments: _Moments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A version that was loaded, as ranks tell each other; empty if there is none."""

    version: str = ""
    """Its id."""
    label: str = ""
    witness: str = ""


class Witness:
    """Notes what a training is, and compares a resumed one with it.

    Make one after everything was restored, and before the first step::

        witness = ckptstore.Witness(run, model=model, optimizer=optimizer, loader=loader)
        run.save(state, step=step, metadata=witness.metadata())
        witness.step(loss=loss, batch=batch)  # after each step

    All ranks of a process group make the same calls. One thread at a time.

    Parameters
    ----------
    run
        The run that the training saves to. The training is compared with the version of it that
        this process loaded last, if that has a witness.
    steps
        Steps after each save that are noted and compared.
    tolerance
        Relative difference of loss and gradients up to which a resume is ``close``.
    **objects
        Parts of the training, by name: all that has ``state_dict()``, generators, containers of
        tensors and numbers. For a number give a function: ``epoch=lambda: epoch``. The global
        generators are compared too.

    Raises
    ------
    InvalidInputError
        An object has no state to compare, or is a number, which would stay what it is now; or
        `run` is no run, or an option is out of its bounds.
    RankFailedError
        Another rank raised an error in this call; names it. The methods raise it too.
    """

    def __init__(
        self, run: Run, /, *, steps: int = 3, tolerance: float = 1e-3, **objects: object
    ) -> None:
        given: object = run
        if not isinstance(given, Run):
            msg = f"a witness is made for a run, not {given!r:.80}"
            raise errors.InvalidInputError(msg, hint='ckptstore.Witness(store.run("gpt"), ...)')
        check_between("tolerance", tolerance, 0, hint="0.001 is a thousandth of the loss")
        integer("steps", steps, 0, _STEPS_MAX)
        for name, one in objects.items():
            if isinstance(one, SCALARS):
                msg = f"{name}={one!r} would stay what it is now"
                raise errors.InvalidInputError(msg, hint=f"give a function: {name}=lambda: {name}")
        self._run = run
        self._steps = steps
        self._tolerance = tolerance
        self._objects = objects
        self._noting: _Stored | None = None
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._first = not self._group or dist.get_rank() == 0
        self._at = 0
        self._close = False
        self._suspected: list[str] = []
        """Gradients and modes that differ from those at the save: the next step may set them."""
        self._report: ResumeReport | None = None
        buffers = (comparison.buffers_of(name, one) for name, one in objects.items())
        self._of_first = set(chain.from_iterable(buffers))
        """Paths of what a resume sets to rank 0's values, and other ranks do not note."""
        self._resumed, self._then = self._loaded()
        if self._then:
            gone = {f"{path} (missing)" for path in self._of_first}
            self._ignored = [
                comparison.unused(self._then, rank) | (gone if rank else set())
                for rank in range(len(self._then[0]))
            ]
            self._compare(self._moments(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def run(self) -> Run:
        """The run that the training saves to."""
        return self._run

    @property
    def active(self) -> bool:
        """True if the next step is noted or compared."""
        return self._comparing or self._being_noted

    @property
    def _comparing(self) -> bool:
        return self._then is not None and self._report is None

    @property
    def _being_noted(self) -> bool:
        return self._noting is not None and len(self._noting.moments) <= self._steps

    @property
    def report(self) -> ResumeReport | None:
        """Result of the comparison; None before it is known, or where nothing was resumed."""
        return self._report

    def metadata(self) -> dict[str, Any]:
        """Return metadata for the save of this moment; steps after it are noted for it."""
        moment = self._moments(0)
        self._noting = _Stored(token=uuid.uuid4().hex, ranks=len(moment), moments=[moment])
        return {_ENTRY: _packed(self._noting)}

    def step(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
        batch: object = None,
    ) -> None:
        """Note the end of a step, or compare it; costs nothing but in the steps after a save.

        Parameters
        ----------
        loss
            Of this step.
        grad_norm
            Norm of the gradients, as ``clip_grad_norm_`` returns it; None to compute it from the
            gradients that the modules have.
        batch
            What the step was trained on: tensors, in any nesting.
        """
        comparing, noting = self._comparing, self._being_noted
        if not (comparing or noting):
            return
        moment = self._moments(1, loss=loss, grad_norm=grad_norm, batch=batch)
        if comparing:
            self._at += 1
            self._compare(moment)
        if noting and self._noting is not None:
            self._noting.moments.append(moment)
            if len(self._noting.moments) > self._steps:
                noted, self._noting = self._noting, None
                self._write(noted.token, {_ENTRY: _packed(noted)})

    def close(self) -> None:
        """Wait until what was noted is in the log, or no save is under way that it belongs to."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._closing.clear()

    # --- moments --------------------------------------------------------------------------------

    def _moments(self, after: int, **told: Any) -> list[Moment]:  # noqa: ANN401 - of :meth:`step`
        """Return what the training is now, by rank."""
        return self._gathered(lambda: self._own_moment(after, **told))

    def _own_moment(
        self, after: int, *, loss: _Figure = None, grad_norm: _Figure = None, batch: object = None
    ) -> Moment:
        """Return what the training is now on this rank."""
        leaves: list[Leaf] = list(comparison.generators())
        for name, one in self._objects.items():
            found = comparison.leaves_of(name, one)
            leaves += (leaf for leaf in found if self._first or leaf[0] not in self._of_first)
            if not after:
                held = comparison.samples(comparison.gradients_of(one))
                leaves.append((f"{GRADIENTS} of {name}", b"".join(held)))
        entries, computed = comparison.digests(leaves, _STEP_ENTRIES_MAX if after else _ENTRIES_MAX)
        if batch is not None:
            told, _ = comparison.digests(comparison.leaves_of(_DATA, batch), 1)
            entries = {**dict.fromkeys([_DATA][: len(told)], "".join(told.values())), **entries}
        norm = self._gradients() if after and grad_norm is None else grad_norm
        return Moment(
            entries=entries,
            computed=frozenset(computed) if after else frozenset(),
            loss=_number(loss),
            gradients=_number(norm),
        )

    def _gradients(self) -> torch.Tensor | None:
        """Return the norm of this rank's gradients; None if there are none."""
        found = [grad for one in self._objects.values() for grad in comparison.gradients_of(one)]
        norms = [torch.linalg.vector_norm(grad) for grad in found]
        if not norms:
            return None
        on_one = torch.stack([norm.to(norms[0].device) for norm in norms])
        total: torch.Tensor = torch.linalg.vector_norm(on_one)
        return total

    # --- comparison -----------------------------------------------------------------------------

    def _loaded(self) -> tuple[_Loaded, _Moments | None]:
        """Return the version that was loaded, the same on all ranks, and what it was."""
        told = self._gathered(self._loaded_here)
        loaded = next((one for one in told if one.version), told[0])
        if not loaded.witness:
            return loaded, None
        stored = _unpacked(loaded.witness)
        ranks = dist.get_world_size() if self._group else 1
        if stored is not None and stored.ranks == ranks:
            return loaded, stored.moments
        why = "its witness is damaged"
        if stored is not None:
            why = f"not compared, as {stored.ranks} ranks saved it and {ranks} go on"
        self._report = ResumeReport(version=loaded.label, verdict="unknown", steps=0, names=(why,))
        self._tell()
        return loaded, None

    def _loaded_here(self) -> _Loaded:
        """Return the version that this process has loaded; rank 0 may have loaded for all."""
        repo = self._run._session.repo
        loaded = resume_check.take_loaded(repo, self._run.name)
        try:
            version = repo.catalog.version(loaded)
        except errors.VersionNotFoundError:
            return _Loaded()
        witness = str(version.metadata.get(_ENTRY, ""))
        if _ENTRY in version.metadata and not witness:
            witness = "empty"
        return _Loaded(version=version.id, label=version.label, witness=witness)

    def _gathered(self, make: Callable[[], T]) -> list[T]:
        """Return what each rank makes, by rank; where one fails, all raise."""
        if not self._group:
            return [make()]
        mine: tuple[T | None, str] = None, ""
        failure: Exception | None = None
        try:
            mine = make(), ""
        except Exception as error:  # noqa: BLE001 - raised below, when the others know
            failure, mine = error, (None, f"{type(error).__name__}: {error}"[:_FAILURE_CHARS])
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        if failure is not None:
            raise failure
        for rank, (_, why) in enumerate(found):
            if why:
                msg = f"the witness of rank {rank} failed: {why}"
                raise errors.RankFailedError(msg, hint="see the error of that rank")
        return [one for one, _ in found]

    def _compare(self, moment: list[Moment]) -> None:
        """Compare the training with what it was after as many steps; conclude if that is all."""
        assert self._then is not None  # noqa: S101  # there is something to compare with
        then = self._then[self._at] if self._at < len(self._then) else []
        now = moment[: len(then)]
        names, close = comparison.differences(then, now, self._tolerance, self._ignored)
        if self._at == 0:
            self._suspected = [name for name in names if GRADIENTS in name or MODES in name]
            names = [name for name in names if name not in self._suspected]
        self._close = self._close or close
        if names or self._at + 1 >= len(self._then):
            best: comparison.Verdict = "close" if self._close else "exact"
            self._conclude("differs" if names else best, self._ordered(names) if names else ())

    def _ordered(self, names: list[str]) -> tuple[str, ...]:
        """Return what differs, and what is suspected; the most likely cause first."""
        if not self._at:
            return (*names, *self._suspected)
        # A step compares modes too, and no gradients.
        causes = [name for name in self._suspected if GRADIENTS in name or name in names]
        return tuple(dict.fromkeys((*causes, *names)))

    def _conclude(self, verdict: comparison.Verdict, names: tuple[str, ...]) -> None:
        self._report = ResumeReport(
            version=self._resumed.label, verdict=verdict, steps=self._at, names=names
        )
        self._tell()
        told = {"verdict": verdict, "steps": self._at, "names": [one[:200] for one in names[:20]]}
        self._write("", {_RESULT: told}, version=self._resumed.version)

    def _tell(self) -> None:
        if self._first and self._report is not None:
            level = logging.INFO if self._report.verdict in {"exact", "close"} else logging.WARNING
            _log.log(level, "%s", self._report)

    # --- the log --------------------------------------------------------------------------------

    def _write(self, token: str, metadata: Mapping[str, Any], version: str = "") -> None:
        """Add metadata to a version, in a thread: a commit to an object store takes a while."""
        if not self._first or self._run._session.repo.options.read_only:
            return
        self._threads = [one for one in self._threads if one.is_alive()]
        work = partial(self._annotate, token, metadata, version)
        try:
            self._threads.append(start_thread(work, "ckptstore-witness"))
        except errors.LimitError as error:  # the save is durable without
            self._unkept(error)

    def _annotate(self, token: str, metadata: Mapping[str, Any], version: str) -> None:
        try:
            found = version or self._saved(token)
            if found:
                self._run.annotate(f"#{found}", metadata=metadata)
        except errors.CkptStoreError as error:  # the training goes on without
            self._unkept(error)

    def _unkept(self, error: errors.CkptStoreError) -> None:
        _log.warning("run %s: the witness was not kept: %s", self._run.name, error)

    def _saved(self, token: str) -> str:
        """Return the version with a token, when it is there; empty if it is not coming."""
        session, left = self._run._session, _POLLS_CLOSING
        for _ in range(_POLLS_MAX):
            saver = session.own_saver
            under_way = saver is not None and saver.in_flight > 0
            for one in reversed(self._run.versions()[-_LOOKED_AT:]):
                stored = _unpacked(one.metadata.get(_ENTRY, ""))
                if stored is not None and stored.token == token:
                    return one.id
            if self._closing.is_set() and not under_way:
                left -= 1
            if left <= 0:
                break
            session.repo.environment.sleep(_POLL_S)
        _log.warning("run %s: no save has the witness that was made for it", self._run.name)
        return ""


_LOOKED_AT: Final = 16
"""Versions at the end of a run among which that of a save is searched."""


def _number(value: _Figure) -> float | None:
    return value.detach().item() if isinstance(value, torch.Tensor) else value


def _packed(stored: _Stored) -> str:
    """Return a witness as text, with as many ranks as a power of two lets fit.

    Ranks are tried from one on, so that the time follows from the limit and not from all ranks.
    """
    data, ranks = "", 1
    while True:
        some = [moment[:ranks] for moment in stored.moments]
        raw = msgspec.msgpack.encode(msgspec.structs.replace(stored, moments=some))
        more = b64encode(zlib.compress(raw, 9)).decode() if len(raw) <= _RAW_BYTES_MAX else ""
        if not more or (len(more) > _BYTES_MAX and data):
            return data
        data = more
        if ranks >= len(stored.moments[0]):
            return data
        ranks *= 2


def _unpacked(data: object) -> _Stored | None:
    """Return a witness that was read; None if it is none, whatever the metadata holds."""
    if not isinstance(data, str) or len(data) > _BYTES_MAX:
        return None
    try:
        raw = zlib.decompressobj().decompress(b64decode(data, validate=True), _RAW_BYTES_MAX)
        found = msgspec.msgpack.decode(raw, type=_Stored)
    except (ValueError, zlib.error, RecursionError):  # ValueError: of binascii and msgspec too
        return None
    counts = {len(ranks) for ranks in found.moments}
    return found if len(counts) == 1 and 0 < min(counts) <= found.ranks else None
