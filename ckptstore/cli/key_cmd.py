"""``ckptstore key``: create and identify keys, and change the key of an encrypted store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from ckptstore.backends.key_sources import make_key_file, read_key
from ckptstore.cli.output import Output
from ckptstore.cli.session import location, vouching
from ckptstore.cli.store_options import DryRun, WriterOptions
from ckptstore.errors import InvalidInputError
from ckptstore.store import mend_keys, rotate_key

_SPEC = "{} file:PATH, env:NAME or command:CMD"


KeyAction = Literal["new", "id", "rotate", "mend"]
"""Action of ``ckptstore key``."""


def key(
    action: Annotated[KeyAction, typer.Argument(metavar="ACTION")],
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]")] = None,
    *,
    new_key: Annotated[str | None, typer.Option(metavar="SPEC")] = None,
    keep_old: bool = False,
    dry_run: DryRun = False,
    options: WriterOptions,
) -> None:
    """Create a key for encrypted stores, print a key's id, or change the key of a store.

    A rotation rewrites one small object and no version: the store's data key, which the key
    encrypts, stays the same. Use mend only while nobody rotates the key: it removes all key records
    that --key does not authenticate. Keys are never printed.

    Parameters
    ----------
    action
        new: create a key in FILE; id: print the id of --key; rotate: let --new- key open the store
        from now on; mend: remove key records that somebody without the key has added.
    file
        File of a new key; never overwritten.
    new_key
        The key to rotate to, in the syntax of --key.
    keep_old
        Keys that open the store now stay valid until a rotation without this option.
    dry_run
        With mend: print what would be removed; change nothing.

    Examples
    --------
    ckptstore key new ckpts.key
    ckptstore key rotate --key file:old.key --new-key file:new.key
    """
    output = options.output("key")
    _check(action, file, new_key, dry_run=dry_run)
    if file is not None:
        made = make_key_file(file)
        output.tell(
            {"action": "new", "file": str(file), "key": made.id},
            f"made the key {made.id} in {file}, which only you can read",
            "keep a second copy in a safe place: what it encrypts is lost without it",
            brief=made.id,
        )
        return
    if not options.key:
        raise InvalidInputError("no key is given", hint=_SPEC.format("--key"))
    if action == "mend":
        _mend(output, options, dry_run=dry_run)
        return
    if new_key is None:
        found = read_key(options.key).id
        output.show({"action": "id", "key": found}, lambda screen: screen.line(found))
        return
    _rotate(output, options, new_key, keep_old=keep_old)


def _check(action: KeyAction, file: Path | None, new_key: str | None, *, dry_run: bool) -> None:
    if (file is not None) is not (action == "new"):
        msg = "a new key wants a FILE, and nothing else does"
        raise InvalidInputError(msg, hint="ckptstore key new FILE")
    if (new_key is not None) is not (action == "rotate"):
        msg = "a rotation wants --new-key SPEC, and nothing else does"
        raise InvalidInputError(msg, hint=_SPEC.format("--new-key"))
    if dry_run and action != "mend":
        msg = "--dry-run is for mend"
        raise InvalidInputError(msg, hint="ckptstore key mend --dry-run --key SPEC")


def _mend(output: Output, options: WriterOptions, *, dry_run: bool) -> None:
    done = mend_keys(location(options.store), dry_run=dry_run, **options.unopened())
    would = "would be " if dry_run else ""
    lines = [f"{one} {would}deleted" for one in done.deleted] or ["nothing to mend"]
    if not done.kept:
        lines.append(f"record {done.record} {would}written anew: this key alone opens the store")
    output.show({"action": "mend", **asdict(done)}, lambda screen: screen.lines(lines))


def _rotate(output: Output, options: WriterOptions, new_key: str, *, keep_old: bool) -> None:
    url, given = location(options.store), options.unopened()
    with vouching():
        done = rotate_key(url, new_key=new_key, keep_old=keep_old, **given)
    lines = [f"opened by {', '.join(done.keys)} from now on"]
    if done.dropped and not output.quiet:
        lines.append(f"no longer by {', '.join(done.dropped)}")
    output.show({"action": "rotate", **asdict(done)}, lambda screen: screen.lines(lines))
