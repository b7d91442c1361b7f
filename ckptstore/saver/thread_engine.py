"""Writes staged saves in a thread of this process, at a low priority."""

from __future__ import annotations

from ckptstore.repo import Repo
from ckptstore.saver.arena import Arena
from ckptstore.saver.job_writer import JobWriter
from ckptstore.saver.messages import Report
from ckptstore.saver.save_job import Hear, SaveJob
from ckptstore.saver.staged import Digests
from ckptstore.saver.thread_priority import step_back
from ckptstore.tensors.bfloat16 import to_bfloat16


class ThreadEngine:
    """One thread that writes job after job; see :class:`ckptstore.saver.save_job.SaveEngine`.

    The threads that digests and codecs run in are children of this one, and have its priority.
    """

    name = "thread"

    def __init__(self, repo: Repo, hear: Hear) -> None:
        def tell(_: SaveJob, report: Report) -> None:
            hear(self, report)

        self._writer = JobWriter(repo, tell, rounding=to_bfloat16, begin=step_back)

    def submit(self, job: SaveJob, arena: Arena) -> None:
        """Take a job over."""
        self._writer.submit(job, arena.view)

    def compare(self, number: int, digests: Digests) -> None:
        """Give a job its digests."""
        self._writer.compare(number, digests)

    def cancel(self, number: int) -> bool:
        """Cancel a job; False if it is done, or being committed."""
        return self._writer.cancel(number)

    def forget(self, arena: int) -> None:
        """Do nothing: arenas are this process's own."""

    def close(self) -> None:
        """Finish what was submitted, and end."""
        self._writer.close()
