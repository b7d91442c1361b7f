"""Write the pages of the reference that are made from the source: api, errors and limits.

    python docs/reference/generate.py

``tests/docs/test_generated_pages.py`` fails when a page is not what this would write.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ckptstore import errors, limits

HERE = Path(__file__).parent
MADE = "<!-- made by docs/reference/generate.py from the docstrings: change those -->\n"

ERRORS = """# Errors

{made}
Everything that ckptstore raises descends from `ckptstore.CkptStoreError`; exceptions of storage
libraries and of the operating system never come through. Classes group errors by what a caller
does about them, and are in `ckptstore.errors`.

```text
{tree}
```

`error.kind` is stable: programs match on it, never on the message. `error.message` says what
happened, `error.hint` what to do next. `error.exit_code` is what the command line exits with; with
`--json` it prints the kind too. Errors can be pickled.

| class | kind | exit code | meaning |
|---|---|---|---|"""

API = {
    "ckptstore": "What most programs need. `ckptstore.open` makes everything else.",
    "ckptstore.integrations.files": "Files of other programs.",
    "ckptstore.integrations.dcp": "torch.distributed.checkpoint on a store.",
    "ckptstore.events": "What operations tell: progress, and events of saves.",
    "ckptstore.maintenance.check.verify": "What `Store.verify` returns.",
    "ckptstore.maintenance.repair.repair_report": "What `Store.repair` returns.",
    "ckptstore.maintenance.check.latest_valid": "What `Run.latest_valid` returns.",
    "ckptstore.maintenance.reports.usage": "What `Store.usage` and `Store.stats` return.",
    "ckptstore.maintenance.reports.sharing": "What `Store.sharing` and `Store.sharing_of` return.",
    "ckptstore.maintenance.reports.diff": "What `Store.diff` returns.",
    "ckptstore.states.compare": "How far apart changed tensors are.",
    "ckptstore.states.transfer": "What `Store.load_into` returns.",
    "ckptstore.format.renames": "How `rename` is read.",
    "ckptstore.catalog.policy": "Retention policies, as text and as JSON.",
    "ckptstore.catalog.retention_rules": "The rules of retention policies.",
    "ckptstore.catalog.retention": "What a policy makes of each version, and why.",
    "ckptstore.maintenance.retention.retain": "What `Store.retain` returns.",
    "ckptstore.maintenance.retention.remove": "What `Store.remove` returns.",
    "ckptstore.maintenance.retention.rounding_report": "Errors and bytes of rounding.",
    "ckptstore.replicas.writeback": "What `Store.write_back` returns.",
    "ckptstore.maintenance.replicas.evict": "What `Store.evict` returns.",
    "ckptstore.catalog.early_stopping": "What `DivergenceGuard.update` returns.",
    "ckptstore.catalog.history": "The values that a metric had.",
    "ckptstore.integrations.plots": "Pictures of a metric; needs the extra `plots`.",
    "ckptstore.integrations.receipt_plots": "Pictures of what saves took; the same extra.",
    "ckptstore.integrations.preemption": "Signals that announce the end, on all ranks.",
    "ckptstore.integrations.lightning_loop": (
        "What `CkptStoreIO` of `ckptstore.integrations.lightning` and "
        "`ckptstore.integrations.pytorch_lightning` does."
    ),
    "ckptstore.integrations.lightning_callback": "What `CkptStoreCallback` of the same two does.",
    "ckptstore.integrations.transformers": "Hugging Face `Trainer`.",
    "ckptstore.integrations.accelerate": "Accelerate.",
    "ckptstore.checkpoint.content": "What `LazyVersion.tensors` returns.",
    "ckptstore.backends.base": "The interface of storage, for who adds one.",
    "ckptstore.backends.probe": "What is found out about a storage.",
    "ckptstore.testing.conformance": "The tests that a backend must pass.",
    "ckptstore.testing.side_door": "What a suite gives the tests to look behind the backend.",
    "ckptstore.testing.faulty": "A backend that fails on purpose.",
}
"""Modules of the public interface, and what they are for."""

_ROLE = re.compile(r":(?:meth|class|func|mod|data|attr):`[~.]?([^`]+)`")
_SECTIONS = ("Parameters", "Returns", "Yields", "Raises", "Attributes", "Notes", "Examples")


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {"api.md": api_page(), "errors.md": errors_page(), "limits.md": limits_page()}


# --- api.md -------------------------------------------------------------------------------------


def api_page() -> str:
    """Return the page of modules, classes and functions."""
    parts = ["# Python API\n", MADE]
    parts += [f"- [{name}](#{name.replace('.', '')}): {use}" for name, use in API.items()]
    parts.append("\nErrors are on [a page of their own](errors.md).\n")
    for name, use in API.items():
        module = importlib.import_module(name)
        parts.append(f"## {name}\n\n{use}\n")
        parts += [_member(module, each) for each in module.__all__]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _member(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    if inspect.isclass(value):
        if issubclass(value, errors.CkptStoreError):
            said = (inspect.getdoc(value) or "").partition("\n")[0]
            return f"### {name}\n\n{said} See [errors](errors.md).\n"
        return _class(name, value)
    if inspect.isfunction(value):
        return f"### {name}\n\n{_signature(name, value)}{_prose(value)}\n"
    return f"### {name}\n\nA value of the module.\n"


def _class(name: str, cls: type) -> str:
    parts = [f"### {name}\n", _prose(cls)]
    fields = _field_texts(cls)
    if fields:
        parts += ["| field | type | |", "|---|---|---|"]
        for field, (annotation, text) in fields.items():
            shown = annotation.replace("|", "\\|")
            parts.append(f"| `{field}` | `{shown}` | {' '.join(text.split())} |")
        parts.append("")
    for attribute, value in vars(cls).items():
        if attribute.startswith("test_"):
            continue
        if attribute.startswith("_") and attribute not in ("__getitem__", "__len__"):
            continue
        if isinstance(value, property):
            parts.append(f"**{name}.{attribute}** (property)\n\n{_prose(value.fget)}\n")
        elif inspect.isfunction(value) or isinstance(value, classmethod):
            function = value.__func__ if isinstance(value, classmethod) else value
            heading = f"**{name}.{attribute}**\n\n{_signature(attribute, function)}"
            parts.append(f"{heading}{_prose(function)}\n")
    return "\n".join(parts)


def _field_texts(cls: type) -> dict[str, tuple[str, str]]:
    """Return annotation and docstring of each annotated field that the class itself has."""
    names = [name for name in vars(cls).get("__annotations__", {}) if not name.startswith("_")]
    source = inspect.getsource(cls) if names else ""
    found = {}
    for name in names:
        after = re.search(
            rf'^    {name}: (?P<type>[^=\n]+?)(?: = .*)?\n(?:    """(?P<text>.*?)""")?',
            source,
            re.MULTILINE | re.DOTALL,
        )
        if after:
            found[name] = (after["type"].strip(), _plain(after["text"] or ""))
    return found


def _signature(name: str, function: object) -> str:
    signature = inspect.signature(function)
    kept = [part for part in signature.parameters.values() if part.name not in ("self", "cls")]
    shown = str(signature.replace(parameters=kept)).replace("'", "")
    shown = _named(shown)
    if len(name + shown) > 100:
        inner = [f"    {_shown(part)}," for part in _with_star(kept)]
        arrow = shown.rpartition(") -> ")[2]
        shown = "(\n" + "\n".join(inner) + f"\n) -> {arrow}"
    return f"```python no-run: a signature\n{name}{shown}\n```\n\n"


def _with_star(parameters: list[inspect.Parameter]) -> Iterator[inspect.Parameter | str]:
    starred = False
    for part in parameters:
        if part.kind is part.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield part


def _shown(part: inspect.Parameter | str) -> str:
    return _named(str(part).replace("'", ""))


def _named(text: str) -> str:
    """Return a signature without addresses in memory."""
    text = re.sub(r"<function (\w+) at [^>]+>", r"\1", text)
    return re.sub(r"<[\w.]*?(\w+) object at [^>]+>", r"\1()", text)


def _prose(owner: object) -> str:
    """Return a docstring as Markdown: its sections as bold words and lists."""
    lines = (inspect.getdoc(owner) or "").splitlines()
    out: list[str] = []
    section = ""
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if line in _SECTIONS and set(below) == {"-"}:
            section = line
            out += [f"**{line}**", ""]
        elif section and line and set(line) == {"-"}:
            continue
        elif section in ("Notes", "Examples", ""):
            out.append(line)
        elif line and not line.startswith(" "):
            out.append(
                f"- `{line}`:" if lines[number + 1 :] and below.startswith(" ") else f"- {line}"
            )
        else:
            out.append("  " + line.strip() if line else "")
    return _plain("\n".join(out)) + "\n"


def _plain(text: str) -> str:
    """Return text without the roles and double quotes of reStructuredText."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


# --- errors.md ----------------------------------------------------------------------------------


def errors_page() -> str:
    """Return the tree of errors, with kind and exit code of each."""
    tree = inspect.getdoc(errors).split("::\n\n", 1)[1].split("\n\nA ``kind``", 1)[0]
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
    """Return every limit and default, with its reason."""
    parts = [
        "# Limits and defaults\n",
        MADE,
        "All are in `ckptstore/limits.py`. What ends in `_MAX` bounds what is accepted from",
        "storage; what ends in `_DEFAULT` can be set. A name ends in its unit.\n",
    ]
    for title, group in read_limits().items():
        parts += [
            f"## {title[:1].upper()}{title[1:]}\n",
            "| name | value | what, and why so much |",
            "|---|---|---|",
        ]
        parts += [f"| `{name}` | {_amount(name)} | {text} |" for name, text in group.items()]
        parts.append("")
    return "\n".join(parts)


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
