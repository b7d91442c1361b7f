"""Renders a page for each public name from its docstrings, read by griffe: nothing is imported."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe

_ROWS = re.compile(r"^## (?P<module>\S+)$|^\| `(?P<name>\w+)` \|", re.MULTILINE)
_SECTIONS = ("Parameters", "Returns", "Yields", "Raises", "Attributes", "Notes", "Examples")
_SPECIAL = ("__getitem__", "__len__")
"""Methods with underscores that users call by an operator or a function."""
_ROLE = re.compile(r":(?:meth|class|func|mod|data|attr):`[~.]?([^`]+)`")
_EXAMPLE = re.compile(r"::\n\n(?P<code>(?:(?: {4}.*)?\n)+)")
_LINE_MAX = 88
_STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


def listed(table: str) -> Iterator[tuple[str, str]]:
    """Yield module and name for each row of the reference's tables."""
    module = ""
    for row in _ROWS.finditer(table):
        if row["module"]:
            module = row["module"]
        else:
            yield module, row["name"]


def linked(table: str, folder: str) -> str:
    """Return the tables with a link from each name to its page."""
    return re.sub(r"^\| `(\w+)` \|", rf"| [`\1`]({folder}/\1.md) |", table, flags=re.MULTILINE)


def rendered(root: Path, table: str) -> dict[str, str]:
    """Return Markdown for each name of the tables, which the source must have."""
    package = griffe.load("ckptstore", search_paths=[root])
    found: dict[str, str] = {}
    for module, name in listed(table):  # the first module counts: the root re-exports some
        if name not in found:
            found[name] = _page(package, module, name)
    return found


def _page(package: griffe.Module, module: str, name: str) -> str:
    within = module.removeprefix("ckptstore").lstrip(".")
    try:
        found = package[f"{within}.{name}" if within else name]
    except KeyError:
        msg = f"the reference lists {module}.{name}, which the source lacks: run make format"
        raise LookupError(msg) from None
    owner = found.final_target if found.is_alias else found
    parts = [f"# {name}\n", f"In `{module}`. [All names](../api.md), [errors](../errors.md).\n"]
    example = _example(package[within] if within else package, name)
    if owner.is_class:
        parts += _class(name, owner, example)
    elif owner.is_function:
        parts += [_signature(name, owner), _prose(owner), example]
    else:
        parts += [f"```py\n{name} = {owner.value}\n```\n", _prose(owner)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _example(module: griffe.Module, name: str) -> str:
    """Return the example of a module if it shows a name: ``run`` in it stands for ``Run``."""
    found = _EXAMPLE.search(module.docstring.value if module.docstring else "")
    if not found or not re.search(rf"\b{name}\b", found["code"], re.IGNORECASE):
        return ""
    code = textwrap.dedent(found["code"]).strip("\n")
    return f"**Example**\n\n```py\n{code}\n```\n"


def _class(name: str, cls: griffe.Class, example: str) -> Iterator[str]:
    """Yield the parts of a class: how it is made, its fields, its properties and methods."""
    prose = _prose(cls)
    if "**Parameters**" in prose:
        yield _signature(name, cls)
    yield prose
    yield example
    inherited = cls.inherited_members if "NamedVersion" in map(str, cls.bases) else {}
    every = {**inherited, **cls.members}.items()
    members = {key: _resolved(one) for key, one in every if _is_shown(key)}
    fields = [one for one in members.values() if one.is_attribute and not _is_property(one)]
    shown = [_field(one) for one in fields if one.docstring or f"- `{one.name}`:" not in prose]
    if shown:
        yield "\n".join(["**Fields**\n", *shown, ""])
    for key, one in members.items():
        if one.is_function:
            yield f"## {name}.{key}\n\n{_signature(key, one)}\n{_prose(one)}"
        elif _is_property(one):
            head = f"```py\n{key}: {one.annotation}  # property\n```\n"
            yield f"## {name}.{key}\n\n{head}\n{_prose(one)}"


def _is_shown(name: str) -> bool:
    return name in _SPECIAL or not name.startswith(("_", "test_"))


def _is_property(one: griffe.Object) -> bool:
    return one.is_attribute and "property" in one.labels


def _resolved(one: griffe.Object) -> griffe.Object:
    """Return the function that a line such as ``load = loading.load`` makes a method."""
    if one.is_attribute and isinstance(one.value, griffe.ExprAttribute):
        root, _, path = one.value.canonical_path.partition(".")
        if root == one.package.name and one.package[path].is_function:
            return one.package[path]
    return one


def _field(field: griffe.Attribute) -> str:
    said = " ".join(_prose(field).split())
    kind = f": {field.annotation}" if field.annotation else ""
    if not kind and "class-attribute" in field.labels:  # of an enumeration
        kind = f" = {field.value}"
    return f"- `{field.name}{kind}`" + (f": {said}" if said else "")


def _signature(name: str, owner: griffe.Class | griffe.Function) -> str:
    """Return a signature as a block: one line if it fits, else one for each parameter."""
    shown: list[str] = []
    for one in owner.parameters:
        if one.name in ("self", "cls") or one.name.startswith("_"):
            continue
        if one.kind is griffe.ParameterKind.keyword_only and not any(p[0] == "*" for p in shown):
            shown.append("*")
        shown.append(_parameter(owner.package, one))
    end = f" -> {owner.returns}" if owner.is_function and owner.returns else ""
    line = f"{name}({', '.join(shown)}){end}"
    if len(line) > _LINE_MAX:
        line = "\n".join([f"{name}(", *(f"    {part}," for part in shown), f"){end}"])
    return f"```py\n{line}\n```\n"


def _parameter(package: griffe.Module, one: griffe.Parameter) -> str:
    stars = _STARS.get(one.kind, "")
    kind = f": {one.annotation}" if one.annotation else ""
    if stars or one.default is None:
        return f"{stars}{one.name}{kind}"
    return f"{one.name}{kind}{' = ' if kind else '='}{_default(package, one.default)}"


def _default(package: griffe.Module, value: griffe.Expr | str) -> str:
    """Return the source of a default; of a limit, or a private constant, its value."""
    path = value.canonical_path if isinstance(value, griffe.Expr) else ""
    if path.startswith("ckptstore.limits.") or path.rpartition(".")[2].startswith("_"):
        return str(package[path.removeprefix("ckptstore.")].value)
    return str(value)


def _prose(owner: griffe.Object) -> str:
    """Return a docstring as Markdown: its sections as bold words and lists."""
    lines = owner.docstring.value.splitlines() if owner.docstring else []
    out: list[str] = []
    section = ""
    for line, below in zip(lines, [*lines[1:], ""], strict=False):
        if line in _SECTIONS and set(below) == {"-"}:
            section = line
            out += [f"**{line}**", ""]
        elif section and line and set(line) == {"-"}:
            continue
        elif section in ("Notes", "Examples", ""):
            out.append(line)
        elif line and not line.startswith(" "):
            out.append(f"- `{line}`:" if below.startswith(" ") else f"- {line}")
        else:
            out.append(line)
    text = _ROLE.sub(r"`\1`", "\n".join(out)).replace("``", "`")
    return re.sub(r"::$", ":", text, flags=re.MULTILINE) + "\n"
