"""Memory of a save: touched before it is needed, and tensors that change beside it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import prefault as module
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import SYSTEM, CodecChoice, Options
from ckptstore.events import silent
from ckptstore.objects.index import KnownPieces, Location
from ckptstore.objects.piece_reader import ReadItem, read_pieces
from ckptstore.objects.piece_writer import write_pieces
from ckptstore.prefault import prefault

PAGE = mmap.PAGESIZE
SIZE = 256 * PAGE
linux = pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")


def _resident(memory: mmap.mmap) -> list[bool]:
    """Return for each page whether it is mapped."""
    libc = ctypes.CDLL(None)
    found = (ctypes.c_ubyte * (len(memory) // PAGE))()
    assert libc.mincore(_address(memory), ctypes.c_size_t(len(memory)), found) == 0
    return [bool(page & 1) for page in found]


def _address(memory: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def _private() -> mmap.mmap:
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _can_populate() -> bool:
    memory = _private()
    prefault(memoryview(memory))
    return all(_resident(memory))


class _Answers:
    """Takes the place of the C library: records calls, and answers as a kernel may."""

    def __init__(self, *, resident: int = 0, mincore: int = 0, madvise: int = 0) -> None:
        self.resident = resident
        self.asked = mincore
        self.answer = madvise
        self.advised: list[tuple[int, int]] = []

    def mincore(self, _start: Any, _size: Any, found: Any) -> int:  # noqa: ANN401 - of ctypes
        found._obj.value = self.resident
        return self._result(self.asked)

    def madvise(self, start: Any, size: Any, advice: int) -> int:  # noqa: ANN401 - of ctypes
        assert advice == module._MADV_POPULATE_WRITE
        self.advised.append((start.value, size.value))
        return self._result(self.answer)

    @staticmethod
    def _result(number: int) -> int:
        ctypes.set_errno(number)
        return -1 if number else 0


# --- what is mapped ------------------------------------------------------------------------------
@linux
def test_whole_pages_of_new_memory_are_mapped_and_no_other() -> None:
    """Neighbours keep their pages as they are; the bytes are zeros as before."""
    if not _can_populate():
        pytest.skip("the kernel is older than 5.14")
    memory = _private()
    begin, end = 3 * PAGE + 5, SIZE - 2 * PAGE - 7
    with memoryview(memory)[begin:end] as part:
        prefault(part)
    assert _resident(memory) == [4 <= page < SIZE // PAGE - 3 for page in range(SIZE // PAGE)]
    assert memory[:] == bytes(SIZE)


@linux
def test_small_neighbours_are_mapped_together_and_what_lies_between_is_not() -> None:
    """In any order; a page that holds no byte of them stays as it is."""
    if not _can_populate():
        pytest.skip("the kernel is older than 5.14")
    memory = _private()
    half = SIZE // PAGE // 2
    edges = [at * 5000 for at in range((half - 3) * PAGE // 5000)]
    far = [half * PAGE + edge for edge in edges]
    with memoryview(memory) as view:
        prefault(*[view[edge : edge + 4990] for edge in [*reversed(far), *edges]])
    there = (edges[-1] + 4990) // PAGE
    assert _resident(memory) == 2 * ([True] * there + [False] * (half - there))


@linux
@pytest.mark.parametrize("kind", ["anonymous", "shared file", "private file"])
@pytest.mark.parametrize("written", [[0], [255], [0, 100, 255], [100]])
def test_bytes_that_are_there_stay(tmp_path: Path, kind: str, written: list[int]) -> None:
    """Of memory that is in use in part, or maps a file, as ``np.memmap`` gives it."""
    memory = _private()
    file = tmp_path / "file"
    if kind != "anonymous":
        file.write_bytes(bytes(SIZE))
        flags = mmap.MAP_SHARED if kind == "shared file" else mmap.MAP_PRIVATE
        with file.open("r+b") as opened:
            memory = mmap.mmap(opened.fileno(), SIZE, flags=flags)
    wanted = bytearray(SIZE)
    for page in written:
        wanted[page * PAGE + 9] = memory[page * PAGE + 9] = 7
    with memoryview(memory) as view:
        prefault(view)
    assert memory[:] == wanted
    if kind == "private file":
        assert file.read_bytes() == bytes(SIZE)


def test_memory_in_use_is_left_alone() -> None:
    """Where the last page is there, and below the least size, nothing is asked of the kernel."""
    memory = bytearray(SIZE)
    with patch.object(module, "_libc", _Answers(resident=1)) as libc:
        prefault(memoryview(memory))
        assert libc.advised == []
    with patch.object(module, "_libc", _Answers()) as libc:
        prefault(memoryview(memory)[: module._BYTES_MIN - 1])
        assert libc.advised == []
        prefault(memoryview(memory)[: module._BYTES_MIN])
        ((start, size),) = libc.advised
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert begin <= start
    assert start + size <= begin + module._BYTES_MIN
    assert start % PAGE == size % PAGE == 0


@linux
def test_a_fork_shares_its_pages_still() -> None:
    """A child that asks for memory of its parent copies none of it, and changes none."""
    memory = _private()
    memory[:] = b"x" * SIZE
    with patch.object(module, "_libc", _Answers()) as libc:
        libc.mincore = ctypes.CDLL(None).mincore  # type: ignore[method-assign] # the real one
        child = os.fork()
        if child == 0:
            prefault(memoryview(memory))
            os._exit(len(libc.advised))
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert memory[:] == b"x" * SIZE


# --- what the kernel may answer ------------------------------------------------------------------
@linux
def test_memory_past_the_end_of_a_file_is_harmless(tmp_path: Path) -> None:
    """A write would be a bus error: the kernel says EFAULT, and the process goes on."""
    file = tmp_path / "file"
    file.write_bytes(bytes(SIZE))
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), SIZE)
        opened.truncate(PAGE)
    with memoryview(memory) as view:
        prefault(view)
    assert memory[:PAGE] == bytes(PAGE)


@linux
@pytest.mark.parametrize("pages", [(0, 1), (100, 101), (255, 256), (0, 256)])
def test_protected_memory_is_harmless(pages: tuple[int, int]) -> None:
    """A part that may only be read keeps its protection and its bytes."""
    memory = _private()
    memory[0] = 7
    first, last = pages
    start = ctypes.c_void_p((_address(memory).value or 0) + first * PAGE)
    protect = ctypes.CDLL(None).mprotect
    assert protect(start, ctypes.c_size_t((last - first) * PAGE), 1) == 0  # PROT_READ
    with memoryview(memory) as view:
        prefault(view)
    assert memory[0] == 7
    assert memory[1:] == bytes(SIZE - 1)


@contextmanager
def _system(name: str) -> Iterator[_Answers | None]:
    answers = {
        "no Linux": None,
        "before 5.14": _Answers(madvise=errno.EINVAL),
        "no memory": _Answers(madvise=errno.ENOMEM),
        "bad address": _Answers(madvise=errno.EFAULT),
        "a range that is not mapped": _Answers(mincore=errno.ENOMEM),
        "no mincore": _Answers(mincore=errno.ENOSYS),
    }
    with patch.object(module, "_libc", answers[name]):
        yield answers[name]


@pytest.mark.short(sample=4)
@pytest.mark.parametrize(
    "name",
    ["no Linux", "before 5.14", "no memory", "bad address", "a range that is not mapped",
     "no mincore"],
)  # fmt: skip
@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_load_is_complete_whatever_the_kernel_answers(
    tmp_path: Path, name: str, codec: str
) -> None:
    """New memory and given tensors, derived ones too, hold every bit of the state."""
    rng = np.random.default_rng(1)
    master = torch.from_numpy(rng.standard_normal((700, 1000)).astype(np.float32))
    state = {"master": master, "low": master.to(torch.bfloat16), "small": torch.arange(9)}
    with ckptstore.open(tmp_path / "s", create=True, codec=codec) as store:
        store.run("gpt").save(state, step=0)
        given = {path: torch.zeros_like(tensor) for path, tensor in state.items()}
        with _system(name) as answers:
            loaded = store.load("gpt@0")
            store.load("gpt@0", into=given)
        for path, tensor in state.items():
            assert torch.equal(loaded[path], tensor)
            assert torch.equal(given[path], tensor)
    if answers is not None:
        assert bool(answers.advised) == (not answers.asked)


CHUNK_BYTES = 1 << 16


@dataclass
class _Trained:
    """A tensor of bytes, all equal, which another thread raises by one again and again."""

    nbytes: int
    in_place: bool
    dtype: str = "uint8"
    itemsize: int = 1
    row_bytes: int = 1
    memory: bytearray = field(default_factory=bytearray)
    changes: int = 0

    def __post_init__(self) -> None:
        self.memory = bytearray(self.nbytes)

    @property
    def payload(self) -> _Trained:
        return self

    def change(self) -> None:
        self.changes += 1
        self.memory[:] = bytes([self.changes % 251]) * self.nbytes

    def view(self) -> memoryview | None:
        """Give the bytes in place, after a step."""
        self.change()
        return memoryview(self.memory).toreadonly() if self.in_place else None

    def copy_into(self, start: int, out: memoryview) -> None:
        self.change()
        out[:] = self.memory[start : start + len(out)]


class _Between(KnownPieces):
    """Knows nothing; each look-up, which stands between digest and store, is a step of training."""

    def __init__(self, sources: list[_Trained]) -> None:
        super().__init__([])
        self._sources = sources

    def find(self, piece_id: bytes, raw_bytes: int) -> Location | None:
        for source in self._sources:
            source.change()
        return super().find(piece_id, raw_bytes)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("size", [3 * CHUNK_BYTES, 1000], ids=["large", "small"])
def test_what_is_stored_is_what_was_digested(size: int, codec: CodecChoice, in_place: bool) -> None:
    """Every piece that comes back has its id, and is the tensor between two of its changes."""
    sources = [_Trained(size, in_place), _Trained(size, in_place)]
    backend = MemoryBackend(f"changing/{size}/{codec}/{in_place}")
    written = write_pieces(
        sources, backend=backend, environment=SYSTEM, options=Options(workers=1),
        known=_Between(sources), chunk_bytes=CHUNK_BYTES, choice=codec, progress=silent,
    )  # fmt: skip
    outs = [bytearray(int(raw)) for raw in written.table.raw]
    read_pieces(
        written.table,
        [ReadItem(row=row, out=memoryview(out), label="w") for row, out in enumerate(outs)],
        backend=backend,
        options=Options(workers=1),
        progress=silent,
    )

    assert sum(map(len, outs)) == 2 * size
    assert all(len(set(out)) == 1 for out in outs)
    assert all(source.changes > 2 for source in sources)
