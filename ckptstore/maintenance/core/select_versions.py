"""Versions that an operation concerns: refs, whole runs, or those that rules choose."""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore.catalog import retention
from ckptstore.catalog.policy import Policy
from ckptstore.maintenance.core.storage_times import StorageTimes
from ckptstore.model import Version
from ckptstore.repo import Repo


def select_versions(
    repo: Repo,
    *,
    refs: Sequence[Version] = (),
    runs: Sequence[str] = (),
    rules: str | Sequence[str] | None = None,
) -> list[Version]:
    """Return versions, each once, in the order of their commits; only those that have content.

    Parameters
    ----------
    refs
        Versions that count in any case.
    runs
        Runs whose versions count, or those that `rules` choose of them. With none, and neither
        `refs` nor `rules`: all runs; with `rules` alone too.
    rules
        As in a retention policy: ``"tagged, best 2 val_loss, every 1000 steps"``.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    InvalidInputError
        A rule does not follow the grammar, or a metric has no direction.
    """
    catalog = repo.refresh()
    policy = None if rules is None else Policy.from_json({"full": rules})
    times, names = StorageTimes(repo), list(runs)
    if not names and (policy is not None or not refs):
        names = [info.name for info in catalog.runs()]
    found = {version.id: version for version in refs}
    for name in names:
        if policy is None:
            chosen = list(catalog.versions(name))
        else:
            chosen = retention.chosen_by(catalog, name, policy, times=times)
        found.update((version.id, version) for version in chosen)
    with_content = (version for version in found.values() if version.level != "record")
    return sorted(with_content, key=lambda version: (version.commit, version.step))
