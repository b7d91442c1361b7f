"""Writes versions as folders for ``from_pretrained`` of transformers and PEFT.

The files of an export become a folder's content, an earlier one's leave. A record names the files
of an export with their digests: a file counts as exported while it has its digest. All others are
foreign: they stay, and those that readers would take for a part of the model are refused.

Files are written and synced in a hidden folder, then renamed one by one. Readers take an adapter
before ``model.safetensors``, and that before an index, so each switch of the weights is one call:

- Shards go under names that no index in the folder has, before the index that names them.
- A single file replaces one, or appears beside an index, which then wins no more.
- An index appears beside a single file, which wins until it is removed.

A configuration that changes would for a moment describe the weights of another export: it leaves
before the switch and comes last. Without it, ``from_pretrained`` refuses the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule

from ckptstore import errors
from ckptstore.backends.oserrors import translate
from ckptstore.backends.posix_publish import FOLDER, sync_folder
from ckptstore.checkpoint.selection import BESIDE
from ckptstore.config import SYSTEM
from ckptstore.hashing import blake3_of
from ckptstore.integrations import pretrained_models as models
from ckptstore.integrations.pretrained_files import described, names_digest, read_json
from ckptstore.jobs.job_outputs import keep_access, replace_file
from ckptstore.store import Store


def describe_model(model: Any, processing: Any = None) -> dict[str, Any]:
    """Return the files of ``save_pretrained`` except the weights, as plain values.

    Save it as ``pretrained`` beside the state dict ``model``, with the role of weights.

    Parameters
    ----------
    model
        A model of transformers, or one of PEFT around it. A model without ``config`` gives an
        empty description.
    processing
        A tokenizer or processor; its files are stored unchanged.
    """
    found: dict[str, Any] = {}
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if hasattr(model, "get_base_model"):
        found["adapter_config"] = models.adapter_configs(model)
        model = model.get_base_model()
    for part in ("config", "generation_config"):
        config = getattr(model, part, None)
        if config is not None:
            found[part] = json.loads(config.to_json_string())
    if "config" in found and not found["config"].get("architectures"):
        kind = type(model).__bases__[-1] if isinstance(model, FSDPModule) else type(model)
        found["config"]["architectures"] = [kind.__name__]
    if processing is not None:
        with tempfile.TemporaryDirectory(prefix="ckptstore-") as folder:
            processing.save_pretrained(folder)
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            found["processing"] = {
                path.relative_to(folder).as_posix(): path.read_bytes() for path in files
            }
    return found


def export_pretrained(
    store: Store,
    ref: str,
    folder: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    merge: bool = False,
    **options: Any,
) -> Path:
    """Write the model of a version as ``save_pretrained`` does: safetensors and configuration.

    If the version has no configuration or tokenizer, they come from the first version of its
    run, or of a run before it: an imported folder, for example.

    Parameters
    ----------
    ref
        A version that :class:`ckptstore.integrations.transformers.StoreTrainerMixin` saved,
        or that is an imported folder; or any whose ``model`` is the state dict of a model.
    folder
        Made if it is missing. Files of the same names are replaced, and those of an earlier
        export removed, which ``.ckptstore-export.json`` names; other files stay. Readers see the
        earlier export or this one; where ``config.json`` changes, none for a moment.
    model
        Of the class and configuration that was saved; it gets the weights. For an adapter, its
        base model, which is copied first. None: the class that the saved configuration names, of
        transformers itself.
    merge
        For a version with an adapter: write the whole model, with the adapter added to its
        weights, instead of the adapter alone (in a folder of its name, unless that is
        ``default``). If the version has no weights of the base model, they come from `model`, or
        else from the place that the adapter's configuration names.
    options
        For ``save_pretrained``, such as ``max_shard_size="5GB"``.

    Raises
    ------
    TensorNotFoundError
        The version has no entry ``model``.
    InvalidInputError
        The version has no configuration, or names a class that transformers lacks; or
        there is nothing to merge; or the folder holds other weights that readers would use.
    ConflictError
        Another process exports to the folder.
    StateError
        Its weights do not fit the model.
    MissingDependencyError
        Transformers, or PEFT for an adapter, is needed and not installed.
    StorageError
        The folder cannot be written, or the version cannot be read.
    """
    path = Path(folder)
    _check_model(model)
    saved = _saved(store, ref)
    if merge and not saved.adapters:
        raise errors.InvalidInputError(f"{ref!r} has no adapter to merge", hint="leave merge out")
    with export_folder(path) as made:
        files = _files(saved.about, made)
        named = saved.about.get("names") == names_digest(map(str, saved.state))
        if named and model is None and not merge:
            models.write_as_read(saved, made, options)
        elif saved.adapters:
            models.write_adapter(saved, made, model=model, merge=merge, options=options)
        else:
            full = model if model is not None else models.empty_model(saved)
            models.fill(full, saved, assign=model is None)
            full.save_pretrained(made, **options)  # type: ignore[operator]  # a PreTrainedModel
        for target, data in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return path


def load_pretrained(store: Store, ref: str, *, model: torch.nn.Module | None = None) -> Any:
    """Return the model of a version; see :meth:`ckptstore.Store.from_pretrained`."""
    _check_model(model)
    saved = _saved(store, ref)
    if saved.adapters:
        made = models.adapted_model(saved, model, device="cpu")
    else:
        made = model if model is not None else models.empty_model(saved, device="cpu")
        models.fill(made, saved, assign=model is None)
        if model is None:
            made.tie_weights()  # type: ignore[operator]  # a PreTrainedModel
    return made.eval()


def _check_model(model: object) -> None:
    if model is not None and (isinstance(model, type) or not hasattr(model, "load_state_dict")):
        msg = f"model must be an instance of a model, not {model!r:.80}"
        raise errors.InvalidInputError(msg, hint="model=MyModel(config), or leave it out")


def _weights(store: Store, version: str, ref: str) -> Mapping[str, torch.Tensor]:
    try:
        found = store.load(f"#{version}", include=["model"]).get("model")
    except errors.TensorNotFoundError:
        found = None
    if not isinstance(found, Mapping):
        msg = f"{ref!r} has no state dict at 'model'"
        hint = "fork it with rename={'': 'model'} if its weights lie at the root"
        raise errors.TensorNotFoundError(msg, hint=hint)
    return found


def _saved(store: Store, ref: str) -> models.SavedModel:
    version = store.resolve(ref).id
    weights = _weights(store, version, ref)
    about = described(store.repo.refresh(), version, lambda one: _said(store, one))
    return models.SavedModel(ref=ref, about=about, state=weights)


def _said(store: Store, version: str) -> Any:  # what the version holds there
    """Return a version's own description of its model; None without one, or if its data is gone."""
    try:
        return store.load(f"#{version}", include=[BESIDE])[BESIDE]
    except errors.NotFoundError:
        return None


def _files(about: Mapping[str, Any], folder: Path) -> dict[Path, bytes]:
    """Return the files that were stored unchanged, by their paths.

    Raises
    ------
    InvalidInputError
        A name leads out of the folder, or its entry is no file.
    """
    found: dict[Path, bytes] = {}
    for name, data in about.get("processing", {}).items():
        if not isinstance(name, str) or "\0" in name or not isinstance(data, bytes):
            raise errors.InvalidInputError(f"the version holds something that is no file: {name!r}")
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            msg = f"the version names a file outside of the folder: {name!r}"
            raise errors.InvalidInputError(msg)
        found[target] = data
    return found


RECORD: Final = ".ckptstore-export.json"
_STAGED: Final = ".ckptstore-export-"
_READ_BYTES: Final = 1 << 20
_SHARD: Final = re.compile(r"(.+)(-\d{5}-of-\d{5}\.(?:safetensors|bin))")
_INDEX: Final = ".index.json"
_SINGLE: Final = (".safetensors", ".bin")
_CONFIGS: Final = frozenset({"config.json", "adapter_config.json"})
_WOULD_WIN: Final = re.compile(
    r".+\.safetensors(\.index\.json)?|adapter_config\.json|\.metadata", re.IGNORECASE
)
"""Foreign files that ``from_pretrained``, the import or a server reads beside or before others."""
_HINT: Final = "move it out of the folder, or name a new folder"


@contextmanager
def export_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder whose files become the content of `folder` if the block succeeds.

    Raises
    ------
    InvalidInputError
        It is a file; or a link or foreign file in it is in the way. It is unchanged.
    ConflictError
        Another process exports to the folder.
    StorageError
        It cannot be written. If the folder is new it does not appear.
    """
    target = Path(os.path.realpath(folder))
    new = not os.path.lexists(target)
    place = target.parent if new else target
    try:
        if not new and not target.is_dir():
            raise errors.InvalidInputError(f"{folder} is no folder", hint="name a new folder")
        place.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            if not new:
                _lock(target, stack)
            beside = stack.enter_context(TemporaryDirectory(prefix=_STAGED, dir=place))
            made = Path(beside, target.name)
            made.mkdir()
            yield made
            digests = _finished(made)
            if new:
                _record(made, made, digests.items())
                made.rename(target)
                sync_folder(str(place))
            else:
                _switch(made, target, digests)
    except OSError as error:
        raise translate(error, f"{folder} cannot be written", writing=True) from error


def _lock(folder: Path, stack: ExitStack) -> None:
    """Exclude other exports to a folder, and remove what an interrupted one left."""
    descriptor = os.open(folder, FOLDER)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        msg = f"another export to {folder} is going on"
        raise errors.ConflictError(msg, hint="wait for its end, or name a new folder") from error
    except OSError:  # a file system without locks
        return
    for left in folder.glob(f"{_STAGED}*"):
        shutil.rmtree(left)


def _finished(made: Path) -> dict[str, str]:
    """Give the files of an export the mode by the umask; make them durable, return the digests."""
    mode = made.stat().st_mode & 0o666
    found: dict[str, str] = {}
    for path in sorted(path for path in made.rglob("*") if path.is_file()):
        path.chmod(mode)  # safetensors keeps its files from all others
        found[path.relative_to(made).as_posix()] = _digest(path)
    return found


def _digest(path: Path) -> str:
    """Return the digest of a file, which is durable then."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return blake3_of(iter(lambda: file.read(_READ_BYTES), b"")).hex()


def _switch(made: Path, folder: Path, digests: Mapping[str, str]) -> None:
    """Replace the files of an earlier export, in the order that the top of the module explains."""
    known = _recorded(folder)
    there = {entry.name for entry in folder.iterdir()}
    stale = {name for name, digest in known if name not in digests and _is(folder / name, digest)}
    if not known:  # an older export; save_pretrained itself removes files of these names
        shards = {name for name in there - digests.keys() if _SHARD.fullmatch(name)}
        stale |= {name for name in shards if _is(folder / name, None)}
    for name in digests:
        path = folder / name
        if path.resolve() != path or (path.exists() and not path.is_file()):
            raise errors.InvalidInputError(f"{path} is a link, or no file", hint=_HINT)
    for name in sorted(there - digests.keys() - stale):
        if _WOULD_WIN.fullmatch(name):
            msg = f"{folder / name} is not of an export, and readers would use it beside this one"
            raise errors.InvalidInputError(msg, hint=_HINT)
    shards = {name for name in digests if _SHARD.fullmatch(name) and name in there}
    mark = SYSTEM.random_hex(4)
    apart = {name: _SHARD.sub(rf"\1-{mark}\2", name) for name in shards}
    indexes = {name: (made / name).read_bytes() for name in digests if name.endswith(_INDEX)}
    pairs = {*known, *digests.items(), *((other, digests[name]) for name, other in apart.items())}
    for name in indexes if apart else ():
        found = json.loads(indexes[name])
        files = {key: apart.get(file, file) for key, file in found["weight_map"].items()}
        replace_file(made / name, json.dumps({**found, "weight_map": files}, indent=2).encode())
        pairs.add((name, _digest(made / name)))
    _record(made, folder, pairs)
    read = "" if "adapter_config.json" in there else "config.json"  # without it nothing is read
    configs = [name for name in digests if _rank(name) == 3 and (folder / name).exists()]
    changed = [x for x in {*configs, read} & digests.keys() if not _is(folder / x, digests[x])]
    for rank in range(4):
        for name in digests:
            if _rank(name) == rank and name not in changed:
                _place(made / name, folder / apart.get(name, name))
        if rank == 0:
            sync_folder(str(folder))
            for name in changed:
                (folder / name).unlink(missing_ok=True)
    for name in sorted({*stale, *apart}, key=_rank, reverse=True):
        (folder / name).unlink()
        with suppress(OSError):
            (folder / name).parent.rmdir()
    for name in changed:
        _place(made / name, folder / name)
    sync_folder(str(folder))
    if _settled(made, folder, apart, indexes):
        _record(made, folder, digests.items())


def _rank(name: str) -> int:
    """Return the place of a file in the order of an export; the last ones say what is read."""
    path = PurePosixPath(name)
    if path.name in _CONFIGS:
        return 3
    if path.suffix in _SINGLE and not _SHARD.fullmatch(path.name):
        return 2
    return int(name.endswith(_INDEX))


def _place(source: Path, target: Path) -> None:
    """Rename a file; it keeps owner and mode of the one that it replaces."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        keep_access(source, target.stat())
    source.replace(target)


def _settled(
    made: Path, folder: Path, apart: Mapping[str, str], indexes: Mapping[str, bytes]
) -> bool:
    """Give shards their usual names; return False on a file system without hard links."""
    try:
        for name, other in apart.items():
            os.link(folder / other, folder / name)
    except OSError:
        for name in apart:
            (folder / name).unlink(missing_ok=True)
        return False
    for name, data in indexes.items() if apart else ():
        replace_file(made / name, data)
        _place(made / name, folder / name)
    for other in apart.values():
        (folder / other).unlink()
    return True


def _is(path: Path, digest: str | None) -> bool:
    """Return whether a path is a file, reached without links, of a digest if one is given."""
    return path.is_file() and path.resolve() == path and digest in (None, _digest(path))


def _record(made: Path, folder: Path, files: Iterable[tuple[str, str]]) -> None:
    replace_file(made / RECORD, json.dumps({"files": sorted(files)}, indent=1).encode())
    _place(made / RECORD, folder / RECORD)


def _recorded(folder: Path) -> set[tuple[str, str]]:
    """Return the files by the record of a folder; none that would lie outside."""
    try:
        found = read_json(folder / RECORD, dict[str, list[tuple[str, str]]]).get("files", [])
    except (FileNotFoundError, errors.FormatError, errors.LimitError):
        return set()
    return {one for one in found if "\0" not in one[0] and folder in (folder / one[0]).parents}
