"""Progress of a resumable verification, in a file of the user's.

One JSON object a line; the first says which check it is, each further one holds the findings of
some rows of a version. A line is on disk before the check goes on; a last line that is cut off,
because the machine stopped while it was written, is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ckptstore import limits
from ckptstore.errors import InvalidInputError, StorageError
from ckptstore.hashing import xxh3_64
from ckptstore.model import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One of some equal parts of all chunks, which a digest of pack and offset tells apart."""

    parts: int
    part: int
    """0 to ``parts - 1``."""

    def holds(self, pack: str, offset: int) -> bool:
        """Return whether a chunk is in this part."""
        return xxh3_64(f"{pack} {offset}".encode()) % self.parts == self.part


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
    """Damaged rows, in decimal, each with its damage."""


class VerifyState:
    """The file, open for appending; owned by one thread and one check."""

    def __init__(self, path: Path, lines: list[_Line], file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._lines = {(line.version, line.manifest, line.first, line.end): line for line in lines}

    def known(self, version: Version, rows: range) -> Mapping[int, str] | None:
        """Return the damage that the interrupted check found in some rows; None if it read none."""
        line = self._lines.get((version.id, version.manifest_digest, rows.start, rows.stop))
        return None if line is None else {int(row): text for row, text in line.bad.items()}

    def told(self, version: Version, rows: range, wrong: Mapping[int, str]) -> None:
        """Keep the findings of some rows."""
        line = _Line(
            version=version.id,
            manifest=version.manifest_digest,
            first=rows.start,
            end=rows.stop,
            bad={str(row): text for row, text in wrong.items()},
        )
        with _typed_errors(self._path):
            _append(self._file, line)


@contextmanager
def open_state(
    path: Path | None, *, store_id: str, sample: Sample | None
) -> Iterator[VerifyState | None]:
    """Open the file of a check, new or interrupted; remove it when the block completes the check.

    Without a path, the check keeps no progress.

    Raises
    ------
    InvalidInputError
        It is the file of another check, or something else.
    StorageError
        It cannot be read or written.
    """
    if path is None:
        yield None
        return
    parts, part = (1, 0) if sample is None else (sample.parts, sample.part)
    head = _Head(verify=1, store=store_id, parts=parts, part=part)
    with ExitStack() as stack:
        with _typed_errors(path):
            lines, size = _read(path, head)
            file = stack.enter_context(path.open("ab"))
            file.truncate(size)
            if not size:
                _append(file, head)
        yield VerifyState(path, lines, file)
    with _typed_errors(path):
        path.unlink(missing_ok=True)


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
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _foreign(path, str(error)) from error
    if not all(row.isdecimal() for line in lines for row in line.bad):
        raise _foreign(path, "a row is no number")
    if found != head:
        raise _foreign(path, "it is of another store, another sample or another format")
    return lines, len(whole)


def _append(file: BinaryIO, line: msgspec.Struct) -> None:
    file.write(msgspec.json.encode(line) + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _foreign(path: Path, why: str) -> InvalidInputError:
    msg = f"{path} is not the state of this verification: {why}"
    return InvalidInputError(msg, hint="name another file, or remove it to start again")


@contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    """Raise StorageError where the system refuses to read or write the file."""
    try:
        yield
    except OSError as error:
        msg = f"the state of the verification in {path}: {error.strerror or error}"
        hint = "name a file in a folder that is there and may be written to"
        raise StorageError(msg, hint=hint) from error
