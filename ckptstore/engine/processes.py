"""Worker processes of this machine, each on a line of its own: who dies loses one task, no more."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from queue import SimpleQueue

from ckptstore import limits
from ckptstore.errors import WorkerDiedError

_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); " + (
    "from ckptstore.engine.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)

_Order = tuple[Future[bytes], bytes]


class _Worker:
    """One process; driven by one thread, ended by any."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            arguments = [json.dumps(sys.path), str(number), str(os.getpid())]
            try:
                self.process = subprocess.Popen(  # noqa: S603 - this very program
                    [sys.executable, "-c", _CODE, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # what goes wrong is on stderr, which is shared
                    pass_fds=[number],
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self._line = Connection(ours.detach())

    def ask(self, data: bytes) -> bytes:
        """Return what a task came to."""
        self._line.send_bytes(data)
        return self._line.recv_bytes()

    def close(self) -> str:
        """Let it end, wait until it has, and return how it did."""
        self._line.close()
        try:
            status = self.process.wait(limits.CHILD_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        return signal.Signals(-status).name if status < 0 else f"status {status}"


class Processes:
    """So many worker processes, started when the first tasks come, and anew when one dies.

    Any thread may submit; ``close`` is for the owner.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: set[_Worker] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def submit(self, data: bytes) -> Future[bytes]:
        """Have a call run in some worker; a future fails with WorkerDiedError if that one dies."""
        future: Future[bytes] = Future()
        with self._lock:
            if len(self._threads) < self.workers:
                thread = threading.Thread(target=self._drive, name="ckptstore-worker", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._orders.put((future, data))
        return future

    def close(self, *, cancel: bool) -> None:
        """End all workers; with `cancel`, without waiting for their tasks."""
        if cancel:
            self._signal(signal.SIGTERM)
        for _ in self._threads:
            self._orders.put(None)
        late = threading.Timer(limits.CHILD_EXIT_S, self._signal, [signal.SIGKILL])
        if cancel:
            late.start()
        try:
            for thread in self._threads:
                thread.join()
        except BaseException:  # Ctrl-C once more
            self._signal(signal.SIGKILL)
            raise
        finally:
            late.cancel()

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            self._stopping = True
            for worker in self._running:
                worker.process.send_signal(number)

    def _drive(self) -> None:
        """Pass tasks to a worker of its own, one after the other."""
        worker: _Worker | None = None
        while (order := self._orders.get()) is not None:
            future, data = order
            if self._stopping:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if worker is None:
                    worker = self._start()
                answer = worker.ask(data)
            except (EOFError, OSError) as error:
                future.set_exception(self._lost(worker, error))
                worker = None
            else:
                future.set_result(answer)
        if worker is not None:
            worker.close()
            self._forget(worker)

    def _start(self) -> _Worker:
        with self._lock:
            if self._stopping:
                raise EOFError
            worker = _Worker()
            self._running.add(worker)
            return worker

    def _lost(self, worker: _Worker | None, error: Exception) -> WorkerDiedError:
        if worker is None:
            return WorkerDiedError(f"a worker process cannot be started: {error}")
        how = worker.close()
        self._forget(worker)
        return WorkerDiedError(f"a worker process ended ({how}) before its task was done")

    def _forget(self, worker: _Worker) -> None:
        with self._lock:
            self._running.discard(worker)
