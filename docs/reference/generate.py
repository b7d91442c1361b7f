"""Write the pages of the reference that are made from the source: api, errors and limits.

    python docs/reference/generate.py

``tests/docs/test_generated_pages.py`` fails when a page is not what this would write.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tokenize
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from ckptstore import errors, limits

HERE = Path(__file__).parent
MADE = "<!-- made by docs/reference/generate.py from the docstrings: change those -->\n"

ERRORS = """# Errors

{made}
Everything that ckptstore raises descends from `ckptstore.CkptStoreError`; exceptions of storage
libraries and of the operating system never come through. Classes group errors by what a caller
does about them; each is `ckptstore.NAME`.

```text
{tree}
```

`error.kind` is stable: programs match on it, never on the message. `error.message` says what
happened, `error.hint` what to do next. `error.exit_code` is what the command line exits with; with
`--json` it prints the kind too. Errors can be pickled.

| class | kind | exit code | meaning |
|---|---|---|---|"""

API = {
    "ckptstore": "For most programs. `ckptstore.open` makes everything else.",
    "ckptstore.reports": "Types of results, to import for annotations.",
    "ckptstore.integrations.files": "Import from and export to files of other programs.",
    "ckptstore.integrations.dcp": "`torch.distributed.checkpoint` on a store.",
    "ckptstore.events": "Progress of operations, and events of saves.",
    "ckptstore.pages.report_file": "A report on a store, as one HTML file.",
    "ckptstore.integrations.preemption": "Signals that announce the end of a job, on all ranks.",
    "ckptstore.integrations.lightning_loop": (
        "Methods of `CkptStoreIO` in `ckptstore.integrations.lightning` and "
        "`ckptstore.integrations.pytorch_lightning`."
    ),
    "ckptstore.integrations.lightning_callback": "Methods of `CkptStoreCallback` in the same two.",
    "ckptstore.integrations.transformers": "Hugging Face `Trainer`.",
    "ckptstore.integrations.accelerate": "Accelerate.",
    "ckptstore.integrations.jax": "Pytrees of JAX, with states of Flax and optax.",
    "ckptstore.integrations.ray_train": "Ray Train.",
    "ckptstore.integrations.weights": "Weights of any trainer's version, into a model.",
    "ckptstore.integrations.data_position": "Positions in the data, at any number of ranks.",
    "ckptstore.integrations.trackers": "MLflow, W&B and Trackio.",
    "ckptstore.backends.base": "The interface of storage, for authors of backends.",
    "ckptstore.backends.probe": "The probe of a storage.",
    "ckptstore.testing.conformance": "The tests that a backend must pass.",
    "ckptstore.testing.answers": "The tests of a backend that speaks HTTP.",
    "ckptstore.testing.side_door": "Access to the storage behind a backend under test.",
    "ckptstore.testing.faulty": "A backend that fails on purpose.",
}
"""Modules of the public interface, and what they are for."""

READING = """The site (`make site`, then `build/site/docs/reference/api.html`) has a page for each
name, with signatures, parameters, results and errors. Python shows the same:
`help(ckptstore.Run.save)`. Errors are on [a page of their own](errors.md).

Besides the errors that a docstring names, every call that reads or writes a store can raise
`StorageError` (the storage failed); every one that changes it `ReadOnlyError` or
`UnsafeBackendError` (it cannot be written to); and every one with a [ref](refs.md)
`InvalidRefError`, `RunNotFoundError` or `VersionNotFoundError` (it names nothing).
"""
_ROLE = re.compile(r":(?:meth|class|func|mod|data|attr):`[~.]?([^`]+)`")
_MET = re.compile(
    r"^(?!.*(TRIES|REREADS|TASK|SENDS|STRAY|VISIBILITY|HEADS|TRANSPLANT|ALIAS|CELLS|LISTED|KEY_))"
    r"(?!(RECIPE|SNAPSHOT|REFERENCES|RECORD|SKELETON|VERIFY|SEGMENT)_)"
    r"(.*_(MAX|DEFAULT)|(?!.*(RESUME|GC_|THAW|DERIVED|SNAPSHOT|WEB)).*_MIN)"
)
"""In the name of a limit that a user can meet; the others tune what happens inside."""


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {"api.md": api_page(), "errors.md": errors_page(), "limits.md": limits_page()}


# --- api.md -------------------------------------------------------------------------------------


def api_page() -> str:
    """Return the tables of public names, from which the site makes a page for each."""
    parts = ["# Python API\n", MADE, READING]
    for name, use in API.items():
        module = importlib.import_module(name)
        listed = [each for each in module.__all__ if each not in errors.__all__]
        rows = [f"| `{each}` | {_meaning(module, each)} |" for each in listed]
        parts += [f"## {name}\n", f"{use}\n", "| name | meaning |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def _meaning(module: ModuleType, name: str) -> str:
    """Return the first paragraph of a docstring; that of a constant stands below it."""
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return _cell(_summary(value))
    for made, below in pairwise(ast.parse(inspect.getsource(module)).body):
        named = ast.unparse(made).partition(" ")[0].rstrip(":") == name
        if named and isinstance(below, ast.Expr):
            return _cell(ast.literal_eval(below.value))
    raise ValueError(f"{module.__name__}.{name} has no docstring below it")


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "\\|")


def _plain(text: str) -> str:
    """Return text without the roles and double quotes of reStructuredText."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


# --- errors.md ----------------------------------------------------------------------------------


def errors_page() -> str:
    """Return the tree of errors, with kind and exit code of each."""
    tree = inspect.getdoc(errors).split("::\n\n", 1)[1].split("\n\nA ``kind``", 1)[0]
    tree = re.sub(r"(?<=[\w)])  +\S.*$", "", tree, flags=re.MULTILINE)  # the table says it
    rows = [
        f"| `{cls.__name__}` | `{cls.kind}` | {cls.exit_code} | {_summary(cls)} |"
        for cls in sorted_errors()
    ]
    text = ERRORS.format(made=MADE, tree=inspect.cleandoc(tree))
    return "\n".join([text, *rows, ""])


def sorted_errors() -> list[type[errors.CkptStoreError]]:
    """Return every class of the tree, parents before children, in the order of the source."""
    found = [getattr(errors, name) for name in errors.__all__]
    return sorted(found, key=lambda cls: inspect.getsourcelines(cls)[1])


def _summary(owner: object) -> str:
    return _plain((inspect.getdoc(owner) or "").split("\n\n")[0].replace("\n", " "))


# --- limits.md ----------------------------------------------------------------------------------


def limits_page() -> str:
    """Return the limits and defaults that a user can meet."""
    parts = [
        "# Limits and defaults\n",
        MADE,
        "A `_MAX` or `_MIN` bounds what is accepted; a `_DEFAULT` can be set. Names end in",
        "their units. `ckptstore/limits.py` has all constants, with their full reasons.\n",
    ]
    for title, group in read_limits().items():
        named: dict[str, list[str]] = {}  # constants that share a comment share a row
        for name, text in group.items():
            if _MET.search(name):
                named.setdefault(text, []).append(name)
        rows = [
            f"| {', '.join(f'`{name}`' for name in names)} "
            f"| {'; '.join(map(_amount, names))} | {_short(text)} |"
            for text, names in named.items()
        ]
        if rows:
            heading = f"## {title[:1].upper()}{title[1:]}\n"
            parts += [heading, "| name | value | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def _short(text: str) -> str:
    """Return the first sentence of a comment, or else the first clause of its reason."""
    meaning, _, source = text.partition("Source: ")
    first = re.split(r"(?<=[.;]) ", meaning)[0].rstrip(" .;")
    clause = re.split(r"[.;:](?= |$)", source)[0]
    if clause.count("(") > clause.count(")"):
        clause = clause.rpartition(" (")[0]
    if first or clause == "as above":
        return f"{first}." if first else ""
    return f"{clause[:1].upper()}{clause[1:]}."


def read_limits() -> dict[str, dict[str, str]]:
    """Return title of each part -> name of each constant -> its comment.

    A comment stands above its constant, or at the end of the line; constants that follow each
    other without a blank line or comment between them share one.
    """
    path = Path(inspect.getsourcefile(limits))
    comments: dict[int, str] = {}
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string.lstrip("# ").strip()
    found: dict[str, dict[str, str]] = {}
    title, above, previous = "", [], 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("# ---"):
            title, above = line.strip("# -"), []
            found[title] = {}
        elif line.startswith("#"):
            above = [*(above if previous == number - 1 else []), comments[number]]
            previous = number
        elif constant := re.match(r"([A-Z][A-Z0-9_]*): Final", line):
            if title:
                own = comments.get(number, "")
                found[title][constant[1]] = own or " ".join(above)
        elif not line.strip():
            above = []
    return found


def _amount(name: str) -> str:
    value = getattr(limits, name)
    if "_BYTES" in name and isinstance(value, int):
        for unit, size in (("GiB", limits.GIB), ("MiB", limits.MIB), ("KiB", limits.KIB)):
            if value >= size and value % size == 0:
                return f"{value // size} {unit}"
    return f"{value:,}"


if __name__ == "__main__":
    for file_name, page in pages().items():
        (HERE / file_name).write_text(page, encoding="utf-8")
