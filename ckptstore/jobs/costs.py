"""What a job costs, by the table of prices in its file."""

from __future__ import annotations

from ckptstore.jobs.job_file import Job
from ckptstore.maintenance.replicas.replicate import ReplicateReport


def estimate_of(
    job: Job, report: ReplicateReport | None, *, part_bytes: int
) -> dict[str, float | str]:
    """Return requests and costs of the copies; rough, since parts and retries vary.

    Parameters
    ----------
    report
        None if nothing was copied.
    part_bytes
        How much of an object the target takes in one request.
    """
    prices = job.prices
    if prices is None or report is None:
        return {}
    versions = len(report.copied)
    puts = -(-report.chunk_bytes // part_bytes) + 3 * versions
    gets = (report.chunks_count if report.checked or job.copy.check else 0) + 2 * versions
    gb = report.chunk_bytes / 1e9
    once = puts * prices.put_per_1000 / 1000 + gets * prices.get_per_1000 / 1000
    return {
        "puts": puts,
        "gets_at_most": gets,
        "once": round(once + gb * prices.moved_per_gb, 6),
        "a_month": round(gb * prices.stored_per_gb_month, 6),
        "currency": prices.currency,
    }
