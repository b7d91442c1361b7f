"""Pickles of ``torch.save``: their archives checked, their plain values read and made."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptstore.errors import FormatError, StateError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

_READ_BYTES: Final = 1 << 20


def from_planner(planner: SavePlanner, item: WriteItem) -> Any:  # any value
    """Return a planner's value for an item, itself and not as its pickle.

    The state's own value, as the default planner gives it, can be anything that the
    store supports. A value that a planner makes comes as a pickle, of plain values.

    Raises
    ------
    StateError
        The planner's pickle holds other objects, or is no pickle.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as Default

    hooks = ("resolve_data", "lookup_object", "transform_object")
    if isinstance(planner, Default) and all(_is_own(planner, name, Default) for name in hooks):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        return data
    try:
        return unpickled(io.BytesIO(data.getvalue()))
    except Exception as error:  # torch may raise any error for bytes that are no pickle
        found = getattr(planner, "state_dict", {}).get(item.index.fqn)
        if pickled(found).getvalue() == data.getvalue():
            return found  # the planner has not changed it
        msg = f"{item.index.fqn!r} is a pickle of the planner's, and not of plain values"
        raise StateError(msg, hint="let the planner's resolve_data return the value") from error


def _is_own(planner: object, name: str, kind: type) -> bool:
    """Return whether a planner has the method of the class `kind`, not an override."""
    return getattr(getattr(planner, name), "__func__", None) is getattr(kind, name)


def unpickled(data: io.BytesIO) -> Any:  # any value
    """Return the result of ``torch.load`` on a pickle of plain values, BytesIO and versions too.

    Raises
    ------
    pickle.UnpicklingError
        It holds other objects, or is no pickle.
    """
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        data.seek(0)
        with torch.serialization.safe_globals([io.BytesIO, torch.torch_version.TorchVersion]):
            return torch.load(data, map_location="cpu", weights_only=True)


def pickled(value: object) -> io.BytesIO:
    """Return a value as ``torch.save`` writes it, which planners expect of a reader.

    The pickle is made here, in memory, of a value that was rebuilt from the store, and the planner
    reads it at once: no pickle comes from storage.
    """
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def check_archive(file: Path | io.BytesIO, size_bytes: int, where: str) -> None:
    """Refuse an archive that torch.save would not write, or of which a checksum is wrong.

    Raises
    ------
    FormatError
        It is one, or no archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            _check_records(records, size_bytes, where)
            for record in records:
                if record.CRC:  # 0: torch was told to compute none
                    with archive.open(record) as opened:
                        while opened.read(_READ_BYTES):
                            pass
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        msg = f"{where} is not a sound file of torch.save: {error}"
        raise FormatError(msg, hint="it is damaged or truncated: copy it again") from error


def _check_records(records: Sequence[zipfile.ZipInfo], size_bytes: int, where: str) -> None:
    if any(
        r.compress_type != zipfile.ZIP_STORED or r.file_size != r.compress_size for r in records
    ):
        msg = f"{where} holds compressed records, which torch.save does not write"
        raise FormatError(msg, hint="extract it first if it is an archive of something else")
    if sum(record.file_size for record in records) > size_bytes:
        raise FormatError(f"{where} claims more bytes than it has")
    if len({record.filename for record in records}) < len(records):
        raise FormatError(f"{where} holds two records of one name")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, shortened; without torch's advice to unpickle."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return re.split(r" (?=Please |In PyTorch |Re-running )|\n", text, maxsplit=1)[0][:200]
