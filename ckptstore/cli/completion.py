"""Completion of runs, refs, tags and metrics in shells; reads the log and nothing else."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from typing import Final

import typer

from ckptstore.catalog.catalog import Catalog
from ckptstore.cli.session import opened_place
from ckptstore.cli.store_options import open_options
from ckptstore.config import set_variable, variable
from ckptstore.errors import CkptStoreError

_OFFERED: Final = 100
"""Names that a shell offers at most; further letters narrow them."""
_PLAIN: Final = re.compile(r"[\w.+:,/@=~-]+\Z")
"""Names that no shell takes for more than a word: others come from storage, and are not offered."""
_BREAKS: Final = ("@", ":", "=")
"""Characters at which bash parts words."""


@contextmanager
def completing() -> Iterator[str]:
    """Yield the command whose words a shell completes; empty if there is none yet.

    Bash has parted ``gpt@best:loss`` into five words, and replaces the last one: for the length of
    the block they are one word again, and what is printed loses the part that bash keeps.
    """
    if variable("_CKPTSTORE_COMPLETE") != "complete_bash":
        yield "".join(variable("_TYPER_COMPLETE_ARGS").split()[1:2])
        return
    words = [""]
    for word in variable("COMP_WORDS").split("\n")[: int(variable("COMP_CWORD") or 0) + 1]:
        parted = word.startswith(_BREAKS) or words[-1].endswith(_BREAKS)
        words[-1:] = [words[-1] + word] if parted else [words[-1], word]
    set_variable("COMP_WORDS", "\n".join(words[1:]))
    set_variable("COMP_CWORD", str(len(words) - 2))
    kept = words[-1][: 1 + max(words[-1].rfind(one) for one in _BREAKS)]
    drawn = io.StringIO()
    try:
        with redirect_stdout(drawn):
            yield "".join(words[2:3])
    finally:
        found = [line.removeprefix(kept) for line in drawn.getvalue().splitlines()]
        sys.stdout.write("".join(f"{line}\n" for line in found))


def completer(parameter: str, metavar: str | None) -> Callable[..., list[str]] | None:
    """Return the function that completes a parameter, by its name and that of its values."""
    of = _metrics if parameter in _OF_METRICS else _KINDS.get((metavar or "").strip("[]."))
    if of is None:
        return None

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        """Return what the store of the command line offers; nothing if it cannot be opened."""
        given = ctx.params
        try:
            options = open_options(given.get("option"), given.get("key"), placed=False)
            with opened_place(str(given.get("store") or ""), options) as store:
                names = of(store.repo.refresh(), incomplete, given.get("run"))
                plain = (x for x in names if x.startswith(incomplete) and _PLAIN.match(x))
                return list(islice(plain, _OFFERED))
        except CkptStoreError:
            return []  # a shell that completes has no place for errors: the command tells them

    return complete


def _refs(catalog: Catalog, incomplete: str, *_run: object) -> Iterable[str]:
    """Return names of runs; behind an @, what names a version of the run."""
    name, at, _ = incomplete.partition("@")
    if not at or not catalog.has_run(name):
        return _runs(catalog)
    info = catalog.run(name)
    best = [f"best:{metric}" for metric in info.metrics]
    steps = map(str, reversed(catalog.steps(name)))
    return (f"{name}@{text}" for text in ("latest", *best, *info.tags, *steps))


def _runs(catalog: Catalog, *_: object) -> Iterable[str]:
    return [info.name for info in catalog.runs()]


def _metrics(catalog: Catalog, _: str, run: object) -> Iterable[str]:
    names = [run] if isinstance(run, str) and catalog.has_run(run) else _runs(catalog)
    return sorted({metric for name in names for metric in catalog.metric_names(name)})


_KINDS: Final[dict[str, Callable[[Catalog, str, object], Iterable[str]]]] = {
    **dict.fromkeys(("REF", "REF2", "RUN|REF", "REF or RUN"), _refs),
    "RUN": _runs,
    "TAG": lambda catalog, *_: sorted({tag for info in catalog.runs() for tag in info.tags}),
}
_OF_METRICS: Final = frozenset({"metric", "metrics", "lower", "higher", "sort"})
