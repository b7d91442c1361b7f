"""Writes staged saves in a thread of this process, at a low priority."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from ckptstore.events import Progress
from ckptstore.repo import Repo
from ckptstore.saver.arena import Arena
from ckptstore.saver.cancellation import Gate
from ckptstore.saver.save_job import Job, Told, background_options, write_job
from ckptstore.saver.staged import Digests
from ckptstore.saver.thread_priority import step_back
from ckptstore.tensors.bfloat16 import to_bfloat16

__all__ = ["ThreadEngine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    job: Job
    arena: Arena
    told: Told
    gate: Gate = field(default_factory=Gate)
    digests: list[Digests] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)


class ThreadEngine:
    """One thread that writes job after job; see :class:`ckptstore.saver.save_job.Engine`.

    Digests, codecs and writes release the interpreter's lock. The threads that they run in are
    children of this one, and have its priority.
    """

    name = "thread"

    def __init__(self, repo: Repo) -> None:
        self._repo = repo
        self._options = background_options(repo.options)
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._tasks: dict[int, _Task] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ckptstore-saver", daemon=True)
        self._thread.start()

    def submit(self, job: Job, arena: Arena, told: Told) -> None:
        """Take a job over."""
        task = _Task(job=job, arena=arena, told=told)
        with self._lock:
            self._tasks[job.number] = task
        self._queue.put(task)

    def compare(self, number: int, digests: Digests) -> None:
        """Know the digests of a job."""
        with self._lock:
            task = self._tasks.get(number)
        if task is not None:
            task.digests.append(digests)
            task.ready.set()

    def cancel(self, number: int) -> bool:
        """Cancel a job; False if it is done, or being committed."""
        with self._lock:
            task = self._tasks.get(number)
        return task is not None and task.gate.cancel()

    def forget(self, arena: int) -> None:
        """Do nothing: arenas are this process's own."""

    def close(self) -> None:
        """Finish what was submitted, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        step_back()
        while (task := self._queue.get()) is not None:
            self._write(task)
            with self._lock:
                del self._tasks[task.job.number]
            del task  # it holds an arena, and the next one may be long in coming

    def _write(self, task: _Task) -> None:
        def tell(seen: Progress) -> None:
            task.told.progressed(seen.done, seen.total)

        task.ready.wait()
        try:
            version, receipt = write_job(
                self._repo,
                task.job,
                task.arena.view,
                task.digests[0],
                options=self._options,
                gate=task.gate,
                progress=tell,
                rounding=to_bfloat16,
            )
        except BaseException as error:  # noqa: BLE001 - whatever it is, it arrives at the caller
            task.told.failed(error)
        else:
            task.told.succeeded(version, receipt)
