"""A Dask scheduler and workers as separate programs, as on a cluster."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from types import TracebackType
from typing import Any, Self

__all__ = ["Cluster"]

# Seconds that workers may take until the scheduler knows them, on a busy machine too.
_START_S = 120


class Cluster:
    """A context manager; `address` is ``dask://HOST:PORT``.

    Parameters
    ----------
    workers
        Programs, each a nanny with one worker process of one thread.
    """

    def __init__(self, *, workers: int) -> None:
        self._count = workers
        self._programs: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        """Start the programs; a scheduler prints its address when it is ready."""
        scheduler = self._start("scheduler", "--host=127.0.0.1", "--port=0", "--no-dashboard")
        assert scheduler.stderr is not None
        for line in scheduler.stderr:
            if found := re.search(r"Scheduler at:\s+tcp://(\S+)", line):
                self.address = f"dask://{found[1]}"
                break
        else:
            raise AssertionError(scheduler.wait())
        # What it logs from here on is read too: a full pipe would stop the scheduler.
        rest = threading.Thread(target=deque(maxlen=0).extend, args=[scheduler.stderr], daemon=True)
        rest.start()
        self._readers.append(rest)
        for _ in range(self._count):
            self._start(
                "worker", self.address.replace("dask", "tcp", 1), "--nthreads=1", "--no-dashboard",
                "--memory-limit=0", quiet=True,
            )  # fmt: skip
        if self._count:
            self.await_workers()
        return self

    def await_workers(self) -> None:
        """Return when the scheduler knows all workers; those that were killed come back."""
        distributed: Any = importlib.import_module("distributed")  # an extra; it has no types
        try:
            with distributed.Client(self.address.replace("dask", "tcp", 1)) as client:
                client.wait_for_workers(self._count, timeout=_START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _start(self, what: str, *arguments: str, quiet: bool = False) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments],
            stderr=subprocess.DEVNULL if quiet else subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._programs.append(program)
        return program

    def kill_scheduler(self) -> None:
        """Kill the scheduler at once, as a failing machine does."""
        self._programs[0].kill()
        self._programs[0].wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all programs, workers of nannies too."""
        for program in reversed(self._programs):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        for reader in self._readers:
            reader.join()
        for program in self._programs:
            if program.stderr is not None:
                program.stderr.close()
