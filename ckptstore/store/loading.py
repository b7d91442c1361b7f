"""Loads versions of an open store; methods of :class:`ckptstore.Store` among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.backends.transfers import operation
from ckptstore.checkpoint.cold_reads import naming_change
from ckptstore.events import ProgressCallback, silent
from ckptstore.model import Version
from ckptstore.store import resume_check
from ckptstore.store.store_session import HasSession, HasVersions, RefT, Session
from ckptstore.store.version_lookup import named_version

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ckptstore.format.paths import Pattern
    from ckptstore.states.lazy import LazyVersion
    from ckptstore.states.shared_load import SharedLoad
    from ckptstore.states.transfer import TransferReport
    from ckptstore.tensors.adapters import TypeAdapter
    from ckptstore.tensors.restore import MapLocation


def version(self: HasSession, ref: str, *, fall_through: bool = True) -> LazyVersion:
    """Return a version to be read lazily; reads its manifest and no data.

    Parameters
    ----------
    fall_through
        As in :meth:`load`.

    Raises
    ------
    CorruptObjectError
        The manifest is damaged. Else as :meth:`resolve`.
    """
    found = named_version(self._session.repo, ref)
    return lazy_version(self._session, found, fall_through=fall_through)


@operation("load")
def load(
    self: HasVersions[RefT],
    ref: RefT,
    *,
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] | None = None,
    map_location: MapLocation = None,
    into: object = None,
    adapters: Sequence[TypeAdapter] = (),
    progress: ProgressCallback = silent,
    fall_through: bool = True,
    refill: bool = False,
    group: ProcessGroup | None = None,
) -> Any:  # noqa: ANN401 - whatever was saved
    """Return the state of a version, every byte checked.

    Evicted or damaged data is read from the nearest replica that has it; the logger ``ckptstore``
    says so once.

    Parameters
    ----------
    ref
        Names the version; see :meth:`resolve`. ``latest-valid`` takes the newest that loads:
        what is damaged in the part that is asked for is skipped, with a warning.
    include, exclude
        Patterns of paths, such as ``"model.*"``; ``*`` also crosses dots, and a path stands
        for everything below it. Only the chunks that are needed are fetched.
    map_location
        As in ``torch.load``, but None means the CPU.
    into
        A state whose tensors are filled in place (``model.state_dict()``, say) and returned.
        Of other values, NumPy arrays too, only the result has those that were saved. After an
        error the tensors may hold anything.
    adapters
        For objects that were saved through a :class:`ckptstore.TypeAdapter`.
    progress
        Called with the bytes done.
    fall_through
        Whether replicas are asked at all.
    refill
        A version that has only its record here is brought back from a replica first
        (:meth:`replicate`), and then loaded from here.
    group
        A process group of torch.distributed, all of whose ranks make this call with the same
        selection, device and kind of target. Each piece is then fetched by one rank, which sends it
        to the others. If a rank fails, all raise its error, or RankFailedError. Nothing else may
        use the group meanwhile.

    Raises
    ------
    VersionNotFoundError, TensorNotFoundError
        The ref or a pattern names nothing; or data is neither here nor in a replica that can be
        reached: the message has every reason.
    InvalidInputError
        `map_location` names no device, or one that this process does not have; or a tensor of
        `into` does not fit. Nothing was read.
    CorruptTensorError
        A stored tensor is damaged, here and in every replica; names it. Other tensors can still
        be loaded.
    RankFailedError
        Another rank of `group` is gone, or failed with an error that is none of ckptstore's.
    StorageError
        The storage failed.
    """
    from ckptstore.states.load import LoadRequest

    session = self._session
    request = LoadRequest(
        include=include, exclude=exclude, map_location=map_location, into=into, adapters=adapters,
        progress=progress,
    )  # fmt: skip

    def ready(version: Version) -> Version:
        """Return a version, brought back first if that is wanted."""
        return session.replicas.refill(version) if refill else version

    opened = partial(lazy_version, session, fall_through=fall_through)
    if group is not None:
        from ckptstore.states.shared_load import SharedLoad

        with SharedLoad(group, alike=True) as together:
            found = _of_first(session, together, lambda: ready(self.resolve(ref)))
            return opened(found)._load_as(replace(request, together=together))
    parsed = self._parsed(ref)  # with a group, only the first rank needs a ref
    if parsed.kind != "valid":
        return opened(ready(self.resolve(ref)))._load_as(request)
    from ckptstore.maintenance.check.latest_valid import first_sound

    return first_sound(session.repo, parsed.run, lambda one: opened(ready(one))._load_as(request))


@operation("load")
def load_into(
    self: HasVersions[RefT],
    ref: RefT,
    target: object,
    *,
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] | None = None,
    rename: Mapping[Pattern, Pattern] | None = None,
    cast: bool | Literal["lossy"] = True,
    strict: bool | None = None,
    progress: ProgressCallback = silent,
    group: ProcessGroup | None = None,
) -> TransferReport:
    """Fill a different model from a version, as far as names and shapes fit; say what did not.

    Parameters
    ----------
    ref
        Names the version; see :meth:`resolve`.
    target
        A module, or a state of tensors and modules such as ``{"model": model}``. Parameters
        and persistent buffers are filled in place, where they are. A module with hooks of
        ``load_state_dict``, extra state, or parameters without memory is asked to load.
    include, exclude
        Patterns of paths of the version; ``["model"]`` keeps the optimizer out of the report.
    rename
        Prefix of a path of the version to what the target calls it: ``{"model": ""}`` for a
        module whose names lie below ``model`` in the version.
    cast
        Convert values to the target's dtype; if not, another dtype is a mismatch. A cast may round;
        the report counts that. One that would change a value further (overflow, wrap, saturation)
        is a mismatch, unless this is ``"lossy"``, which converts as ``Tensor.copy_`` does.
    strict
        True: refuse before anything is read unless all names and shapes fit. None: load what
        fits, and name the rest in a warning of the logger ``ckptstore``. False: no warning.
    progress
        Called with the bytes done.
    group
        As in :meth:`load`.

    Raises
    ------
    VersionNotFoundError, TensorNotFoundError
        The ref, a pattern or a prefix names nothing.
    InvalidInputError
        The target holds no tensor, two paths get one name, nothing of the version fits the
        target, or `strict` is not met; the hint names the `rename` that fits. Where only the
        values or the code of a module show that, the message names what has changed.
    StateError
        The code of a module failed.
    CorruptTensorError, RankFailedError, StorageError
        A tensor cannot be read; the target may then hold anything.
    """
    from ckptstore.states.shared_load import SharedLoad
    from ckptstore.states.transfer import TransferRequest, transfer

    session = self._session
    request = TransferRequest(
        include=include, exclude=exclude, rename=rename, cast=cast, strict=strict, progress=progress
    )
    if group is None:
        found = lazy_version(session, self.resolve(ref))
        with naming_change(session.repo, found.info):
            return transfer(session.repo, found.info, found._content, target, request)
    with SharedLoad(group, alike=True) as together:
        found = lazy_version(session, _of_first(session, together, lambda: self.resolve(ref)))
        content = together.shared(found._content)
        return transfer(session.repo, found.info, content, target, request)


def from_pretrained(self: HasSession, ref: str, *, model: torch.nn.Module | None = None) -> Any:  # noqa: ANN401 - a model of any class
    """Return the model of a version, as ``from_pretrained`` of its class does: for inference.

    The version is an imported folder of Transformers or PEFT, or was saved with the Trainer. With
    adapters of PEFT it is a ``PeftModel``, whose base model comes from the version, `model`, or the
    place that the adapter names. Needs the extra ``transformers``; runs no code of the version.

    Parameters
    ----------
    ref
        Names the version; its weights are at ``model``.
    model
        An instance to fill, or the base model of an adapter, which is copied. None: the class of
        transformers that the saved configuration names.

    Raises
    ------
    TensorNotFoundError
        The version has no entry ``model``.
    InvalidInputError
        It has no configuration, or names a class that transformers lacks.
    StateError
        Its weights do not fit the model.
    MissingDependencyError
        Transformers, or PEFT for an adapter, is not installed.
    """
    # Integrations are above this layer and optional: found by name, when asked for.
    pretrained = import_module("ckptstore.integrations.pretrained")
    return pretrained.load_pretrained(self, ref, model=model)


def _of_first(session: Session, together: SharedLoad, find: Callable[[], Version]) -> Version:
    """Return the version that the first rank of a group finds."""

    def found() -> Version:
        return replace(find(), metadata={}, metrics={}, receipt={}, roles={})

    version = together.first(found)
    _ = session.repo.catalog  # replicas are looked up in the log as it was read
    return version


def lazy_version(session: Session, version: Version, *, fall_through: bool = True) -> LazyVersion:
    """Return a version to be read lazily; reads its manifest and no data."""
    from ckptstore.states.lazy import LazyVersion

    resume_check.chosen(session.repo, version.run, version=version.id)
    with naming_change(session.repo, version):
        content = session.replicas.content(version, fall_through=fall_through)
    whole = None
    if fall_through and version.level != "full" and session.repo.log.catalog.replicas:
        whole = partial(session.replicas.whole, version)
    again = partial(_again, session, version.id, fall_through=fall_through)
    return LazyVersion(session.repo, version, content, whole=whole, again=again)


def _again(session: Session, version: str, *, fall_through: bool) -> LazyVersion:
    """Return a lazy version in the process that unpickled it."""
    found = named_version(session.repo, f"#{version}")
    return lazy_version(session, found, fall_through=fall_through)
