"""Writes staged saves in a thread of this process, at a low priority."""

from __future__ import annotations

from ckptstore.repo import Repo
from ckptstore.saver.arena import Arena
from ckptstore.saver.job_writer import JobWriter
from ckptstore.saver.messages import Report
from ckptstore.saver.save_job import Hear, SaveJob
from ckptstore.saver.thread_priority import step_back
from ckptstore.tensors.bfloat16 import to_bfloat16


class ThreadEngine(JobWriter):
    """One thread that writes job after job; see :class:`ckptstore.saver.save_job.SaveEngine`.

    The threads that digests and codecs run in are children of this one, and have its priority.
    """

    name = "thread"

    def __init__(self, repo: Repo, hear: Hear) -> None:
        def tell(_: SaveJob, report: Report) -> None:
            hear(self, report)

        super().__init__(repo, tell, rounding=to_bfloat16, begin=step_back)

    def submit(self, job: SaveJob, arena: Arena) -> None:
        """Take a job over."""
        self.take(job, arena.view)

    def forget(self, arena: int) -> None:
        """Do nothing: arenas are this process's own."""
