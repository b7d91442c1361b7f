"""How far a verification has come, in a file of the user's: what makes it resumable.

One JSON object a line; the first says which check it is, each further one what was found of some
rows of a version. A line is on disk before the check goes on; a last line that is cut off, because
the machine stopped while it was written, is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from ckptstore import limits
from ckptstore.errors import InvalidInputError, StorageError
from ckptstore.maintenance.check.integrity_scan import Sample
from ckptstore.model import Version


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    verify: int
    """Version of this file's format."""
    store: str
    parts: int
    part: int


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: str
    manifest: str
    """Digest: rows of another manifest of the version mean other pieces."""
    first: int
    end: int
    bad: dict[str, str] = {}
    """Row, in decimal, to what is wrong with it."""


class VerifyState:
    """The file, open for appending; owned by one thread and one check."""

    def __init__(self, path: Path, lines: list[_Line], file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._lines = {(line.version, line.manifest, line.first, line.end): line for line in lines}

    @classmethod
    def begin(cls, path: Path, *, store_id: str, sample: Sample | None) -> Self:
        """Open the file of a check, new or interrupted.

        Raises
        ------
        InvalidInputError
            It is the file of another check, or something else.
        StorageError
            It cannot be read or written.
        """
        parts, part = (sample.parts, sample.part) if sample else (1, 0)
        head = _Head(verify=1, store=store_id, parts=parts, part=part)
        try:
            lines, size = _read(path, head)
            file = path.open("ab")
            try:
                file.truncate(size)
                if not size:
                    file.write(msgspec.json.encode(head) + b"\n")
                    _settle(file)
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise _failed(path, error) from error
        return cls(path, lines, file)

    def known(self, version: Version, rows: range) -> Mapping[int, str] | None:
        """Return what the interrupted check found of some rows, None if it did not look."""
        line = self._lines.get((version.id, version.manifest_digest, rows.start, rows.stop))
        if line is None:
            return None
        return {int(row): text for row, text in line.bad.items()}

    def told(self, version: Version, rows: range, wrong: Mapping[int, str]) -> None:
        """Keep what was found of some rows."""
        line = _Line(
            version=version.id,
            manifest=version.manifest_digest,
            first=rows.start,
            end=rows.stop,
            bad={str(row): text for row, text in wrong.items()},
        )
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            _settle(self._file)
        except OSError as error:
            raise _failed(self._path, error) from error

    def remove(self) -> None:
        """Remove the file: the check is complete."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise _failed(self._path, error) from error

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file; it stays."""
        self._file.close()


def _read(path: Path, head: _Head) -> tuple[list[_Line], int]:
    """Return the whole lines after the first, and how many bytes are whole."""
    if not path.exists():
        return [], 0
    if path.stat().st_size > limits.VERIFY_STATE_BYTES_MAX:
        raise _foreign(path, "it is too large")
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        # Cut off in its first line, or not ours: only what could have become ours is replaced.
        if (msgspec.json.encode(head) + b"\n").startswith(data):
            return [], 0
        raise _foreign(path, "it holds something else")
    first, *rest = whole.splitlines()
    try:
        found = msgspec.json.decode(first, type=_Head)
        lines = [msgspec.json.decode(line, type=_Line) for line in rest]
        if not all(row.isdecimal() for line in lines for row in line.bad):
            raise _foreign(path, "a row is no number")
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _foreign(path, str(error)) from error
    if found != head:
        raise _foreign(path, "it is of another store, another sample or another format")
    return lines, len(whole)


def _settle(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _foreign(path: Path, why: str) -> InvalidInputError:
    msg = f"{path} is not the state of this verification: {why}"
    return InvalidInputError(msg, hint="name another file, or remove it to begin anew")


def _failed(path: Path, error: OSError) -> StorageError:
    msg = f"the state of the verification in {path}: {error.strerror or error}"
    return StorageError(msg, hint="name a file in a folder that is there and may be written to")
