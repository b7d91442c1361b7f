"""Archival jobs: run on a schedule, from a file that describes two stores."""

from __future__ import annotations

from ckptstore.jobs.job_file import Job, read_job
from ckptstore.jobs.work import JobReport, StepReport, run_job

__all__ = ["Job", "JobReport", "StepReport", "read_job", "run_job"]
