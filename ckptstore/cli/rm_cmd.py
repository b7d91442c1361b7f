"""``ckptstore rm``: delete or reduce versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from ckptstore.catalog.levels import LowerLevel
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.rounding_text import rounding_document, rounding_text
from ckptstore.cli.session import find_versions, is_run_name, opened
from ckptstore.cli.store_options import DryRun, WriterOptions
from ckptstore.cli.text import bytes_text, count_text, freed_later
from ckptstore.errors import InvalidInputError, PolicyError, VersionNotFoundError
from ckptstore.maintenance.reports.documents import name_document
from ckptstore.maintenance.retention.remove import Removal
from ckptstore.model import Version
from ckptstore.shown import parts_text
from ckptstore.store import Store

_FOR_GOOD: Final = "undelete does not bring it back"


def rm(
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...")] = None,
    *,
    run: Annotated[str | None, typer.Option(metavar="RUN")] = None,
    keep: LowerLevel | None = None,
    lossy: Annotated[str | None, typer.Option(metavar="ENCODING")] = None,
    force: Annotated[bool, typer.Option("--force", "-f")] = False,
    dry_run: DryRun = False,
    reason: Annotated[str, typer.Option(metavar="TEXT")] = "",
    options: WriterOptions,
) -> None:
    """Delete or reduce versions; undelete restores deleted versions until gc has run.

    Parameters
    ----------
    refs
        The versions.
    run
        All versions of this run.
    keep
        Reduce versions for good: keep the weights, exact or rounded, or only the record. Undelete
        cannot undo this.
    lossy
        With --keep weights-bf16 or weights-int8: error bound of each tensor, for example
        'int8:rel_l2=0.02'. A tensor that would exceed it stays at the level above.
    force
        Also delete tagged versions, heads of runs, and the only verified version.
    dry_run
        Print what would be deleted; change nothing. Exits with 7 if rm would refuse.
    reason
        Reason, recorded in the log.

    Examples
    --------
    ckptstore rm gpt@1000 gpt@1100
    ckptstore rm --run lora --keep weights --dry-run
    """
    output = options.output("rm")
    if lossy is not None and keep not in {"weights-bf16", "weights-int8"}:
        msg = "--lossy says how far rounded weights may go, and none are kept"
        raise InvalidInputError(msg, hint="--keep weights-bf16, or --keep weights-int8")
    with opened(options, writing=not dry_run) as opening:
        named = [f"#{version.id}" for version in _chosen(opening, refs or [], run)]
        found = opening.remove(
            named, keep=keep, lossy=lossy, reason=reason, force=force, dry_run=dry_run
        )
        total = sum(removal.reclaimable_bytes for removal in found)
        document = {
            "dry_run": dry_run,
            "keep": keep,
            "versions": [_document(removal) for removal in found],
            "reclaimable_bytes": total,
        }
        output.show(document, lambda screen: None if options.quiet else _draw(screen, found))
        output.note(_summary(found, keep, dry_run=dry_run))
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
    return {
        **name_document(removal.version),
        "obstacle": removal.obstacle or None,
        "reclaimable_bytes": removal.reclaimable_bytes,
        "rounding": rounding_document(removal.rounding),
        "dropped": removal.dropped,
    }


def _summary(found: Sequence[Removal], part: str | None, *, dry_run: bool) -> str:
    """Return a summary of the deletion, done or planned."""
    kept = sum(1 for removal in found if removal.obstacle)
    what = "deleted" if part is None else f"reduced to {part}"
    if kept:
        return f"0 would be {what}: {count_text(kept)} of {count_text(len(found))} in the way"
    freed = freed_later(sum(removal.reclaimable_bytes for removal in found))
    done = f"would be {what}" if dry_run else what
    text = f"{count_text(len(found))} {done}; {freed}"
    return text if part is None or not found else f"{text}; for good: {_FOR_GOOD}"


def _draw(screen: Screen, found: Sequence[Removal]) -> None:
    rounded = any(removal.rounding for removal in found)
    screen.listing(
        found,
        Column("RUN", lambda one: one.version.run),
        Column("STEP", lambda one: str(one.version.step), right=True, wrap=False),
        Column("ID", lambda one: one.version.id[:8], wrap=False),
        Column("FREES", lambda one: bytes_text(one.reclaimable_bytes), right=True, wrap=False),
        Column("ERROR", lambda one: rounding_text(one.rounding), wrap=False, shown=rounded),
        Column("DROPS", lambda one: parts_text(one.dropped), shown=any(x.dropped for x in found)),
        Column("IN THE WAY", lambda one: one.obstacle or "-"),
    )
