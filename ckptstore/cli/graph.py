"""The tree of versions as text, as ``git log --graph`` draws it; pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def arranged(parents: Mapping[str, str], first: Mapping[str, int]) -> list[str]:
    """Return the nodes of a forest so that each comes after all its descendants.

    Parameters
    ----------
    parents
        Node to its parent, oldest first; empty, or a node that is not there, for roots.
    first
        Per node a rank: of the children of one node, the lower come first, with all that is
        below them; of equal rank the newest. Roots go from the newest to the oldest.
    """
    children: dict[str, list[str]] = {}
    roots = []
    for node, parent in parents.items():
        if parent in parents:
            children.setdefault(parent, []).append(node)
        else:
            roots.append(node)
    age = {node: place for place, node in enumerate(parents)}
    found: list[str] = []
    # Roots are written before what is above them, and all of it turned round at the end.
    waiting = sorted(roots, key=lambda node: -age[node])
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += sorted(children.get(node, ()), key=lambda n: (first.get(n, 0), -age[n]))
    return found[::-1]


def rails(order: Sequence[str], parents: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return what stands left of each node: its own line, and lines to draw before it.

    Parameters
    ----------
    order
        Nodes, each after its descendants.
    parents
        Node to its parent; one that is not in `order` ends the line. An empty line parts trees
        that have nothing in common.
    """
    there = set(order)
    columns: list[str] = []
    """Per column the node that it leads down to."""
    rows: list[tuple[str, list[str]]] = []
    for node in order:
        places = [place for place, wanted in enumerate(columns) if wanted == node]
        before: list[str] = []
        if not places:
            if rows and not columns:
                before.append("")  # nothing above has to do with what follows
            columns.append(node)
            places = [len(columns) - 1]
        while len(places) > 1:  # lines that lead to one node come together, from the right
            before.append(_joined(len(columns), places[0], places[-1]))
            del columns[places.pop()]
        place = places[0]
        marks = ["*" if at == place else "|" for at in range(len(columns))]
        rows.append((" ".join(marks), before))
        parent = parents.get(node, "")
        if parent in there:
            columns[place] = parent
        else:
            del columns[place]
    return rows


def _joined(count: int, into: int, leaving: int) -> str:
    """Draw ``count`` lines of which one goes over to another left of it; what is right follows."""
    line = [" "] * (2 * count - 1)
    for place in range(count):
        if place < leaving:
            line[2 * place] = "|"
        elif place > leaving:
            line[2 * place - 1] = "/"
    line[2 * leaving - 1] = "/"
    for place in range(into, leaving - 1):
        line[2 * place + 1] = "_"
    return "".join(line).rstrip()
