"""``ckptstore undelete``: restore deleted versions that no collection has freed yet."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.cli.session import full_ref, opened
from ckptstore.cli.store_options import WriterOptions
from ckptstore.cli.text import version_text
from ckptstore.errors import InvalidInputError, VersionNotFoundError
from ckptstore.maintenance.reports.documents import name_document
from ckptstore.model import Version


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
    output = options.output("undelete")
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
        output.tell({"versions": [name_document(v) for v in found]}, *lines)


def _less(version: Version) -> str:
    """Return the parts of a version that were dropped before its deletion and are not restored."""
    if version.level == "full":
        return ""
    return f"; it was reduced to {version.level}, which is for good"
