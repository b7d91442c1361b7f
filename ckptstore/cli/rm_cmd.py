"""``ckptstore rm`` and ``ckptstore undelete``: delete versions, and restore deleted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ckptstore.cli.output import Column, Screen
from ckptstore.cli.session import find_versions, full_ref, is_run_name, opened
from ckptstore.cli.store_options import DryRun, WriterOptions
from ckptstore.cli.text import bytes_text, count_text, freed_later, version_text
from ckptstore.errors import InvalidInputError, PolicyError, VersionNotFoundError
from ckptstore.maintenance.reports.documents import name_document
from ckptstore.maintenance.retention.by_hand import Removal
from ckptstore.model import Version
from ckptstore.store import Store


def rm(
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...")] = None,
    *,
    run: Annotated[str | None, typer.Option(metavar="RUN")] = None,
    force: Annotated[bool, typer.Option("--force", "-f")] = False,
    dry_run: DryRun = False,
    reason: Annotated[str, typer.Option(metavar="TEXT")] = "",
    options: WriterOptions,
) -> None:
    """Delete versions; undelete restores deleted versions until gc has run.

    Parameters
    ----------
    refs
        The versions.
    run
        All versions of this run.
    force
        Also delete tagged versions, heads of runs, and the only verified version.
    dry_run
        Print what would be deleted; change nothing. Exits with 7 if rm would refuse.
    reason
        Reason, recorded in the log.

    Examples
    --------
    ckptstore rm gpt@1000 gpt@1100
    ckptstore rm --run lora --dry-run
    """
    output = options.output("rm")
    with opened(options, writing=not dry_run) as opening:
        named = [f"#{version.id}" for version in _chosen(opening, refs or [], run)]
        found = opening.remove(named, reason=reason, force=force, dry_run=dry_run)
        total = sum(removal.reclaimable_bytes for removal in found)
        versions = [_document(removal) for removal in found]
        document = {"dry_run": dry_run, "versions": versions, "reclaimable_bytes": total}
        output.show(document, lambda screen: None if options.quiet else _draw(screen, found))
        output.note(_summary(found, dry_run=dry_run))
        if any(removal.obstacle for removal in found):
            raise typer.Exit(PolicyError.exit_code)


def _chosen(store: Store, refs: Sequence[str], run: str | None) -> list[Version]:
    if bool(refs) == (run is not None):
        msg = "name versions, or a run with --run"
        raise InvalidInputError(msg, hint="ckptstore rm RUN@STEP, or ckptstore rm --run RUN")
    if run is None:
        found = find_versions(store, refs)
        for ref in refs:
            if is_run_name(store, ref):
                hint = f"write {ref}@latest, or --run {ref} for all versions"
                raise InvalidInputError(f"{ref!r} is a run, not a version", hint=hint)
        return found
    versions = store.versions(run)
    if not versions:
        raise VersionNotFoundError(f"run {run!r} has no version")
    return versions


def _document(removal: Removal) -> dict[str, Any]:
    found = {"obstacle": removal.obstacle or None, "reclaimable_bytes": removal.reclaimable_bytes}
    return {**name_document(removal.version), **found}


def _summary(found: Sequence[Removal], *, dry_run: bool) -> str:
    """Return a summary of the deletion, done or planned."""
    kept = sum(1 for removal in found if removal.obstacle)
    if kept:
        return f"0 would be deleted: {count_text(kept)} of {count_text(len(found))} in the way"
    freed = freed_later(sum(removal.reclaimable_bytes for removal in found))
    return f"{count_text(len(found))} {'would be deleted' if dry_run else 'deleted'}; {freed}"


def _draw(screen: Screen, found: Sequence[Removal]) -> None:
    screen.listing(
        found,
        Column("RUN", lambda one: one.version.run),
        Column("STEP", lambda one: str(one.version.step), right=True, wrap=False),
        Column("ID", lambda one: one.version.id[:8], wrap=False),
        Column("FREES", lambda one: bytes_text(one.reclaimable_bytes), right=True, wrap=False),
        Column("IN THE WAY", lambda one: one.obstacle or "-"),
    )


def undelete(
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...")] = None,
    *,
    run: Annotated[str | None, typer.Option(metavar="RUN")] = None,
    options: WriterOptions,
) -> None:
    """Restore deleted versions: all that are named, or none.

    Parameters
    ----------
    refs
        #ID, a bare id, or RUN@STEP.
    run
        All deleted versions of this run.

    Examples
    --------
    ckptstore undelete gpt@1000
    ckptstore undelete --run gpt
    """
    if bool(refs) == (run is not None):
        msg = "name versions, or a run with --run"
        raise InvalidInputError(msg, hint="ckptstore log shows what was deleted")
    with opened(options, writing=True) as opening:
        if run is not None:
            deleted = opening.repo.refresh().versions(run, deleted=True)
            named = [f"#{version.id}" for version in deleted]
            if not named:
                raise VersionNotFoundError(f"no version of run {run!r} was deleted")
        else:
            named = [full_ref(opening, ref) for ref in refs or ()]
        found = opening.undelete(named)
        lines = [f"{version_text(v)} is back{_less(v)}" for v in found]
        options.output("undelete").tell({"versions": [name_document(v) for v in found]}, *lines)


def _less(version: Version) -> str:
    """Return the parts of a version that were dropped before its deletion and are not restored."""
    if version.level == "full":
        return ""
    return f"; it was reduced to {version.level}, which is for good"
