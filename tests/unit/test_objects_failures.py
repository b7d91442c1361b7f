"""One failure stops a save or a load as a whole: no thread, no file and no version is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from threadwatch import threads_left

from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.registry import open_backend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.codecs.codec_table import encode
from ckptstore.codecs.plane_layout import Layout
from ckptstore.config import SYSTEM, CodecChoice, Options
from ckptstore.errors import CorruptTensorError, OperationCancelledError, StorageError
from ckptstore.events import Progress, silent
from ckptstore.objects import piece_reader
from ckptstore.objects.index import KnownPieces
from ckptstore.objects.packs import PackPlan, PackSink
from ckptstore.objects.piece_reader import ReadItem, read_pieces
from ckptstore.objects.piece_writer import Written, write_pieces
from ckptstore.testing.faulty import Fault, FaultyBackend, When

CHUNK_BYTES = 1 << 16
PATIENCE_S = 60.0


@dataclass
class Bytes:
    """A tensor of bytes that counts how often it is read, and may fail where its readers meet."""

    data: bytes
    meeting: Meeting | None = None
    reads: list[int] = field(default_factory=list)
    dtype: str = "uint8"
    itemsize: int = 1
    row_bytes: int = 1

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def payload(self) -> Bytes:
        return self

    def view(self) -> memoryview | None:
        return None

    def copy_into(self, start: int, out: memoryview) -> None:
        self.reads.append(start)
        if self.meeting is not None:
            self.meeting.arrive()
        out[:] = self.data[start : start + len(out)]


@dataclass
class Meeting:
    """Where all workers are at once: then one fails, and the others go on when that is known.

    It is known when the worker that fails has ended.
    """

    workers: int
    monkeypatch: pytest.MonkeyPatch
    failing: int = 0

    def __post_init__(self) -> None:
        self._all_here = threading.Barrier(self.workers)
        self._known = threading.Event()
        real = Future.set_exception

        def watched(future: Future[None], error: BaseException | None) -> None:
            real(future, error)
            if threading.get_ident() == self.failing:
                self._known.set()

        self.monkeypatch.setattr(Future, "set_exception", watched)

    def arrive(self) -> None:
        """Wait for the others, the first time; fail, or wait until one has."""
        if self.failing:
            return
        if self._all_here.wait(PATIENCE_S) == 0:
            self.failing = threading.get_ident()
            msg = "this piece cannot be read"
            raise StorageError(msg)
        assert self._known.wait(PATIENCE_S)


class Far(WrapperBackend):
    """Counts what is read, and fails where its readers meet."""

    meeting: Meeting
    reads = 0

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.reads += 1
        self.meeting.arrive()
        self.inner.read_into(key, offset, buffers)


def write(source: Bytes, backend: Backend, *, choice: CodecChoice = "raw") -> Written:
    """Write one tensor."""
    return write_pieces(
        [source], backend=backend, environment=SYSTEM, options=Options(workers=4),
        known=KnownPieces([]), chunk_bytes=CHUNK_BYTES, choice=choice, progress=silent,
    )  # fmt: skip


def noise(chunks: int) -> bytes:
    """Return so many chunks, no two alike."""
    return b"".join(n.to_bytes(4, "big") * (CHUNK_BYTES // 4) for n in range(chunks))


def test_a_failing_worker_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one piece fails, each other worker finishes the piece it has, and no more."""
    source = Bytes(noise(40), Meeting(4, monkeypatch))
    backend = MemoryBackend("failures/worker")

    with pytest.raises(OSError, match="cannot be read"):
        write(source, backend)

    assert len(source.reads) == 4
    assert not backend.objects
    assert not threads_left()


def test_a_failing_pack_stops_the_save() -> None:
    """A pack that does not become durable, behind the caller's back, is raised all the same."""
    backend = MemoryBackend("failures/pack")
    fault = Fault(calls=frozenset({"writer.commit"}), at=1)
    with pytest.raises(StorageError, match="injected"):
        write(Bytes(noise(5)), FaultyBackend(backend, fault))

    assert fault.hits == 1
    assert not backend.objects
    assert not threads_left()


def test_a_failing_read_stops_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one range fails, no thread starts another."""
    backend = MemoryBackend("failures/read")
    written = write(Bytes(noise(100)), backend)
    far = Far(backend)
    far.meeting = Meeting(4, monkeypatch)
    items = [ReadItem(row=row, out=None, label="w") for row in range(0, 100, 2)]

    with pytest.raises(StorageError, match="cannot be read"):
        read_pieces(written.table, items, backend=far, options=Options(workers=4), progress=silent)

    assert far.reads == 4
    assert not threads_left()


def test_a_damaged_piece_is_reported_and_the_others_are_read() -> None:
    """With a callback for failures, exactly the pieces that are hit are reported."""
    backend = MemoryBackend("failures/damaged")
    written = write(Bytes(noise(20)), backend)
    table = written.table
    (key,) = backend.objects
    torn = bytearray(backend.objects[key].data)
    torn[int(table.offset[7]) + 64 + 5] ^= 1
    backend.delete(key)
    backend.put(key, torn)
    lost: list[tuple[int, str]] = []
    outs = [bytearray(CHUNK_BYTES) for _ in range(20)]

    read_pieces(
        table,
        [ReadItem(row=r, out=memoryview(out), label=f"t{r}") for r, out in enumerate(outs)],
        backend=backend,
        options=Options(workers=2),
        progress=silent,
        on_failure=lambda item, error: lost.append((item.row, str(error))),
    )

    assert [row for row, _ in lost] == [7]
    assert "tensor t7" in lost[0][1]
    whole = noise(20)
    for row, out in enumerate(outs):
        if row != 7:
            assert out == whole[row * CHUNK_BYTES : (row + 1) * CHUNK_BYTES]
    with pytest.raises(CorruptTensorError, match="tensor t7"):
        read_pieces(
            table, [ReadItem(row=7, out=None, label="t7")], backend=backend,
            options=Options(workers=2), progress=silent,
        )  # fmt: skip


def test_a_decoder_never_sees_bytes_that_do_not_match_their_check_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Damage to encoded bytes is found by the check sum of the header, before they are decoded."""
    backend = MemoryBackend("failures/checksum")
    written = write(Bytes(bytes(CHUNK_BYTES)), backend, choice="zstd")
    (key,) = backend.objects
    torn = bytearray(backend.objects[key].data)
    torn[32 + 64 + 9] ^= 1
    backend.delete(key)
    backend.put(key, torn)
    decoded: list[object] = []
    monkeypatch.setattr(piece_reader, "decode", lambda *words: decoded.append(words))

    with pytest.raises(CorruptTensorError, match="checksum"):
        read_pieces(
            written.table, [ReadItem(row=0, out=None, label="w")], backend=backend,
            options=Options(workers=1), progress=silent,
        )  # fmt: skip
    assert decoded == []


def test_packs_take_nothing_after_they_were_aborted() -> None:
    """A worker that nobody waits for any more cannot begin a pack."""
    backend = MemoryBackend("failures/aborted")
    plan = PackPlan(streams=1, at_once=1, first_bytes=1024, most_bytes=1024)
    sink = PackSink(backend, SYSTEM, plan)
    encoded = encode(memoryview(b"x" * 100), Layout.BYTES, "raw")
    sink.append(0, encoded, bytes(32), 100)
    sink.abort()

    with pytest.raises(OperationCancelledError):
        sink.append(0, encoded, bytes(32), 100)
    assert not backend.objects


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("stage", ["writer.write", "writer.commit", "open_writer"])
def test_an_interrupt_ends_a_save(stage: str, tmp_path: Path) -> None:
    """Ctrl-C while workers write: KeyboardInterrupt, no thread, no file under any name."""
    fault = Fault(
        calls=frozenset({stage}),
        at=1,
        when=When.CALLBACK,
        callback=lambda _call, _key: os.kill(os.getpid(), signal.SIGINT),
    )
    backend = FaultyBackend(open_backend(tmp_path / "store"), fault)

    with pytest.raises(KeyboardInterrupt):
        interrupted(Bytes(noise(200)), backend)

    assert fault.hits == 1
    while threads_left():  # an interrupted join returns a moment before its thread has ended
        time.sleep(0.01)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not [name for name in left if name.startswith(".tmp-")]
    assert not left or stage == "writer.commit"  # a whole pack that nothing names


def interrupted(source: Bytes, backend: Backend) -> None:
    """Write, and wait for the signal if it comes at the very end."""
    write(source, backend)
    threading.Event().wait(PATIENCE_S)


def test_progress_counts_to_the_whole() -> None:
    """The last report of a save and of a load is the whole, and reports never go back."""
    backend = MemoryBackend("failures/progress")
    steps: list[Progress] = []
    source = Bytes(noise(9))
    written = write_pieces(
        [source], backend=backend, environment=SYSTEM, options=Options(workers=3),
        known=KnownPieces([]), chunk_bytes=CHUNK_BYTES, choice="raw", progress=steps.append,
    )  # fmt: skip
    read_pieces(
        written.table, [ReadItem(row=row, out=None, label="w") for row in range(9)],
        backend=backend, options=Options(workers=3), progress=steps.append,
    )  # fmt: skip

    for stage in ("write", "read"):
        done = [step.done for step in steps if step.stage == stage]
        assert done == sorted(done)
        assert done[-1] == source.nbytes


SAVER = """
import sys, time, torch, ckptstore
store = ckptstore.open(sys.argv[1], create=True)
run = store.run("gpt")
run.save({"w": torch.zeros(1000)}, step=0)
state = {"w": torch.randn(20_000_000)}
print("begins", flush=True)
step = 1
while True:
    state["w"][0] = step
    state["w"] += 1
    run.save(state, step=step)
    step += 1
"""


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_program_ends_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGINT to a program in the middle of a save: it ends by KeyboardInterrupt, without a hang.

    Every version that is there loads; no temporary file is left.
    """
    import ckptstore

    folder = tmp_path / "store"
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"begins\n"
            while not any(path.name.startswith(".tmp-") for path in folder.rglob("*")):
                time.sleep(0.001)  # until a pack is being written
            program.send_signal(signal.SIGINT)
            _, told = program.communicate()
        finally:
            program.kill()

    assert b"KeyboardInterrupt" in told
    assert program.returncode == -signal.SIGINT
    assert not [path for path in folder.rglob("*") if path.name.startswith(".tmp-")]
    with ckptstore.open(folder) as store:
        assert store.verify().ok
        assert len(store.versions()) >= 1
