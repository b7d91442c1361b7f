"""Export: the tensors of a version become one safetensors file, with bounded memory; torch-free.

The layout is a u64 length, a JSON header and the data. All sizes are known from the manifest, so
the header is written first and the tensors follow one after the other, as they are read and
checked. The file appears under its name when it is complete and on disk, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptstore import limits
from ckptstore.backends.transfers import operation
from ckptstore.errors import CorruptObjectError, InvalidInputError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.paths import PathFilter, Pattern
from ckptstore.integrations.safetensors_plan import encode_header, plan_file
from ckptstore.integrations.safetensors_stream import FileStream, PlannedFile, Weight
from ckptstore.jobs.job_outputs import new_file
from ckptstore.model import Version
from ckptstore.store import Store

_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of an export."""

    path: str
    version: Version
    tensors_count: int
    """Tensors in the file; a tied one counts once for each of its paths."""
    file_bytes: int
    left_out: tuple[str, ...]
    """Paths of values that were asked for, but are no tensors: numbers, texts, generators."""


@operation("export")
def export_safetensors(
    store: Store,
    ref: str,
    path: str | os.PathLike[str],
    *,
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] | None = None,
    strip_prefix: str = "",
    overwrite: bool = False,
    progress: ProgressCallback = silent,
) -> Exported:
    """Write the tensors of a version to a safetensors file; checks every byte.

    Tied tensors and views are written once for each path, NumPy arrays as tensors. Host memory
    stays near ``EXPORT_WINDOW_BYTES``, unless a tensor is not stored row by row.

    Parameters
    ----------
    ref
        Names the version.
    path
        A local file; it appears when it is complete and synced, or not at all. It keeps the owner
        and mode of a file that it replaces; of a symbolic link, the target is replaced.
    include, exclude
        Patterns of paths as in :meth:`ckptstore.Store.load`.
    strip_prefix
        Prefix removed from names: ``model.`` makes ``model.embed.weight`` the
        ``embed.weight`` that ``load_state_dict`` expects.
    overwrite
        Replace an existing file.
    progress
        Called with the bytes done.

    Raises
    ------
    StateError
        A tensor has a dtype that safetensors does not know (complex128, quantized, sub-byte
        integers); names it. Nothing was written.
    TensorNotFoundError
        A pattern matches nothing, or there is no tensor at all.
    InvalidInputError
        Two tensors would have one name; or the name does not end in ``.safetensors``.
    ConflictError
        The file exists, and `overwrite` is False.
    CorruptTensorError
        A stored tensor is damaged; names it. No file appears.
    StorageError
        The store or the local disk failed. No file appears.
    """
    _check_name(Path(path))
    repo = store.repo
    version = store.resolve(ref)
    content = store._session.replicas.content(version)
    items, left_out = plan_file(content, PathFilter(include, exclude), strip_prefix)
    plan = PlannedFile(encode_header(items, version), tuple(Weight(one, one) for one in items))
    stream = FileStream(content, repo, plan, limits.EXPORT_WINDOW_BYTES)
    with new_file(Path(path), overwrite=overwrite) as file:
        for part in stream.read(0, plan.nbytes):
            file.write(part)
            done, total = (size - len(plan.header) for size in (file.tell(), plan.nbytes))
            progress(Progress(stage="export", done=done, total=total))
        size = file.tell()
        if size != plan.nbytes:  # the manifest and its skeleton were checked, so this is a bug
            raise CorruptObjectError(f"{size} bytes were written, not {plan.nbytes}")
    return Exported(
        path=os.fspath(path),
        version=version,
        tensors_count=len(items),
        file_bytes=size,
        left_out=left_out,
    )


def _check_name(path: Path) -> None:
    """Refuse a file name that hides the format from readers, ``import`` included."""
    if path.is_dir():
        msg = f"{path} is a folder, but an export is one file"
        raise InvalidInputError(msg, hint=f"name the file: {path / ('model' + _SUFFIX)}")
    if path.suffix != _SUFFIX:
        msg = f"{path} does not end in {_SUFFIX}, the format of the export"
        name = "NAME" if path.name == "-" or not path.name else path.stem or path.name
        raise InvalidInputError(msg, hint=f"call it {path.with_name(name + _SUFFIX)}")
