"""``ckptstore tag``: add or remove a name of a version in its run."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import WriterOptions
from ckptstore.errors import InvalidInputError


def tag(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    name: Annotated[str, typer.Argument(metavar="TAG")],
    *,
    delete: Annotated[bool, typer.Option("--delete", "-d")] = False,
    options: WriterOptions,
) -> None:
    """Tag a version, so that RUN@TAG names it; or delete a tag of a run.

    Parameters
    ----------
    ref
        The version; with --delete the run's name.
    name
        The tag; it moves if it exists.
    delete
        Remove the tag from the run.

    Examples
    --------
    ckptstore tag gpt@1200 release
    ckptstore tag gpt release --delete
    """
    output = options.output("tag")
    with opened(options, writing=True) as opening:
        if delete:
            if "@" in ref or ref.startswith("#"):
                msg = f"--delete wants the name of a run, not {ref!r}"
                raise InvalidInputError(msg, hint=f"ckptstore tag RUN {name} --delete")
            run = opening.run(ref)
            was = run.info.tags.get(name)
            run.untag(name)
            document = {"run": ref, "tag": name, "version": None, "previous": was}
            text = f"{ref}@{name} is gone"
        else:
            found = find_version(opening, ref)
            was = opening.repo.catalog.run(found.run).tags.get(name)
            opening.tag(f"#{found.id}", name)
            document = {"run": found.run, "tag": name, "version": found.id, "previous": was}
            text = f"{found.run}@{name} is step {found.step}, {found.id[:8]}"
            if was and was != found.id:
                text += f"; it was {was[:8]}"
        output.tell(document, text)
