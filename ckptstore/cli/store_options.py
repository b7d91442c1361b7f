"""Command-line options shared by several commands, and parsers for their values.

Related options form one parameter: a group, see :func:`ckptstore.cli.main.flattened`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import typer

from ckptstore.cli.output import Output
from ckptstore.errors import InvalidInputError

_common: Final = partial(typer.Option, rich_help_panel="Common options")

_OWN: Final = {
    "url": "--store URL names the store",
    "encryption_key": "--key SPEC gives the key",
    "single_writer": "--single-writer is an option of the commands that write",
    "chunk_bytes": "ckptstore init --chunk-size SIZE sets it",
    "create": "ckptstore init makes a store",
    "cache_folder": "--cache FOLDER names the cache",
    "dry_run": "--dry-run is an option of the commands that change something",
    "read_only": "commands that only read open a store so",
    "keep_old": "--keep-old is an option of ckptstore key rotate",
    "new_key": "--new-key is an option of ckptstore key rotate",
    **dict.fromkeys(
        ["encrypted", "environment", "location", "name", "retry", "self", "source"], "leave it out"
    ),
}
"""Names that ``--option`` refuses because they belong to ckptstore, each with its hint."""

StoreUrl = Annotated[
    str | None,
    _common(
        "--store",
        "-s",
        metavar="URL",
        envvar="CKPTSTORE_URL",
        help="The store: a path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, "
        "https://host/path (read-only) or any fsspec URL.",
    ),
]
StorageOptions = Annotated[
    list[str] | None,
    _common(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option for the storage library, such as endpoint_url=http://host:9000; "
        "KEY:=JSON for numbers and objects. Repeatable.",
    ),
]
AsJson = Annotated[bool, _common("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[
    bool, _common("--quiet", "-q", help="Print only the result: no progress, no notes.")
]
Utc = Annotated[bool, _common("--utc", help="Print times in UTC instead of local time.")]
Runs = Annotated[
    list[str] | None,
    typer.Option("--run", metavar="RUN", help="Select all versions of this run. Repeatable."),
]


DryRun = Annotated[bool, typer.Option("--dry-run", "-n")]
FromReplica = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="replica:NAME",
        help="Of a version of which only the record is here: open this replica, if it has the "
        "content, with --from-option and --from-key.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Options of every command: location and key of the store, and output format.

    Parameters
    ----------
    key
        The key of an encrypted store: file:PATH, env:NAME or command:CMD.
    cache
        A folder such as /dev/shm/ckptstore, through which the processes of this host share what
        they fetch from a remote store.
    """

    store: StoreUrl = None
    option: StorageOptions = None
    key: Annotated[str | None, _common(metavar="SPEC", envvar="CKPTSTORE_KEY")] = None
    cache: Annotated[str | None, _common(metavar="FOLDER", envvar="CKPTSTORE_CACHE")] = None
    json: AsJson = False
    quiet: Quiet = False

    def output(self, command: str) -> Output:
        """Return the output that prints the result of a command."""
        return Output(command, as_json=self.json, quiet=self.quiet)

    def storage_options(self) -> dict[str, Any]:
        """Return what ``--option`` asks of the storage library.

        Raises
        ------
        InvalidInputError
            As :func:`parse_storage_options`.
        """
        return parse_storage_options(self.option or ())

    def given(self) -> dict[str, Any]:
        """Return storage options and key as :func:`ckptstore.open` takes them.

        Raises
        ------
        InvalidInputError
            As :func:`parse_storage_options`.
        """
        given = open_options(self.option, self.key, placed=False)
        return given if self.cache is None else {**given, "cache_folder": self.cache}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions(CommonOptions):
    """Options of every command that can change the store.

    Parameters
    ----------
    single_writer
        You guarantee that nothing else writes to the store. This allows storage that cannot create
        an object only if it is absent.
    """

    single_writer: bool = False

    def unopened(self) -> dict[str, Any]:
        """Return options, key and `single_writer` for a store that is mended without being opened.

        Raises
        ------
        InvalidInputError
            As :func:`parse_storage_options`.
        """
        own = {"encryption_key": self.key, "single_writer": self.single_writer}
        return {**own, **self.storage_options()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Options that open a second store: that of ``--to``, ``--replica`` or an argument.

    Parameters
    ----------
    to_option
        Like --option, for the other store. Repeatable.
    to_key
        Like --key, for the other store; a store created with it is encrypted.
    """

    to_option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None
    to_key: Annotated[str | None, typer.Option(metavar="SPEC")] = None

    def given(self, *, placed: bool = True) -> dict[str, Any]:
        """Return them as :func:`ckptstore.open` takes them; the key only where there is one.

        Parameters
        ----------
        placed
            As of :func:`parse_storage_options`.

        Raises
        ------
        InvalidInputError
            As :func:`parse_storage_options`.
        """
        return open_options(self.to_option, self.to_key, placed=placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Options that open the source store of ``--from``.

    Parameters
    ----------
    from_option
        Like --option, for the store of --from. Repeatable.
    from_key
        Like --key, for the store of --from.
    """

    from_option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None
    from_key: Annotated[str | None, typer.Option(metavar="SPEC")] = None

    def given(self) -> dict[str, Any]:
        """Return them as :func:`ckptstore.open` takes them; the key only where there is one.

        Raises
        ------
        InvalidInputError
            As :func:`parse_storage_options`.
        """
        return open_options(self.from_option, self.from_key)

    def check(self, source: str | None, wanted: str) -> None:
        """Refuse options for a store that is not named.

        Parameters
        ----------
        source
            What ``--from`` says.
        wanted
            What it should say.

        Raises
        ------
        InvalidInputError
            There are options, and no store.
        """
        if source is None and (self.from_option or self.from_key):
            msg = "--from-option and --from-key are for the store of --from, and none is named"
            raise InvalidInputError(msg, hint=f"--from {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options that choose where tasks run.

    Parameters
    ----------
    engine
        Where tasks run: threads of this process (the default), or the workers of a Dask scheduler,
        dask://HOST:PORT.
    workers
        Number of tasks at once; the default depends on --engine.
    """

    engine: Annotated[str | None, typer.Option(metavar="ENGINE")] = None
    workers: Annotated[int | None, typer.Option(min=1, metavar="N")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """Options that select tensors by path.

    Parameters
    ----------
    include
        Only tensors whose path matches, for example 'model.*'. Repeatable.
    exclude
        Skip tensors whose path matches. Repeatable.
    """

    include: Annotated[list[str] | None, typer.Option(metavar="PATTERN")] = None
    exclude: Annotated[list[str] | None, typer.Option(metavar="PATTERN")] = None


def open_options(
    options: Sequence[str] | None, key: str | None, *, placed: bool = True
) -> dict[str, Any]:
    """Return storage options and a key, if there is one, as :func:`ckptstore.open` takes them.

    Parameters
    ----------
    placed
        As of :func:`parse_storage_options`.

    Raises
    ------
    InvalidInputError
        As :func:`parse_storage_options`.
    """
    given = parse_storage_options(options or (), placed=placed)
    return given if key is None else {**given, "encryption_key": key}


def parse_storage_options(texts: Sequence[str], *, placed: bool = False) -> dict[str, Any]:
    """Return what ``--option`` asks for.

    ``key=value`` is text, but ``true`` and ``false`` are booleans; ``key:=value`` is JSON. Values
    may be secrets and never appear in an error.

    Parameters
    ----------
    placed
        ``url`` may be among them: the place of a replica that they are for.

    Raises
    ------
    InvalidInputError
        A text is neither, or its JSON is not valid; the key is named. Or the key is a name of
        ckptstore's own.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        as_json = key.endswith(":")
        key = key.removesuffix(":")
        if not equals or not key.isidentifier():
            shown = key if key.isidentifier() else "..."
            msg = f"--option wants KEY=VALUE or KEY:=JSON, not {shown!r}"
            raise InvalidInputError(msg, hint="such as --option endpoint_url=http://host:9000")
        if as_json:
            try:
                options[key] = json.loads(value)
            except ValueError:
                msg = f"--option {key}:= is not followed by JSON"
                raise InvalidInputError(msg, hint=f"write {key}=TEXT for text") from None
        else:
            options[key] = {"true": True, "false": False}.get(value, value)
    for name in options.keys() & (_OWN.keys() - {"url" if placed else ""}):
        msg = f"{name!r} is not an option of the storage library"
        raise InvalidInputError(msg, hint=_OWN[name])
    return options


def parse_pairs(
    texts: Sequence[str], form: str, example: str, *, unnamed: bool = False
) -> dict[str, str]:
    """Return what is given as ``NAME=VALUE``; `form` and `example` are for errors.

    Parameters
    ----------
    unnamed
        A name may be empty.

    Raises
    ------
    InvalidInputError
        A text has no ``=`` or no name, or a name occurs twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not (name or unnamed) or name in pairs:
            problem = "is the second of its name" if name in pairs else f"is not {form}"
            raise InvalidInputError(f"{text!r} {problem}", hint=f"such as {example}")
        pairs[name] = value
    return pairs


def parse_metrics(texts: Sequence[str]) -> dict[str, float]:
    """Return metrics given as ``name=value``; ``nan`` and ``inf`` are numbers.

    Raises
    ------
    InvalidInputError
        A text is not of this form, or a name occurs twice.
    """
    metrics: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            name = ""
        if not name:
            raise InvalidInputError(f"{text!r} is not NAME=NUMBER", hint="such as val_loss=2.31")
        if name in metrics:
            raise InvalidInputError(f"the metric {name!r} is given twice")
        metrics[name] = number
    return metrics
