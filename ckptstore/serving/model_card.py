"""Makes the model card of a version from the catalog."""

from __future__ import annotations

import html
import json
from itertools import islice

from ckptstore.catalog.catalog import Catalog
from ckptstore.model import Version

_LINEAGE = 10
"""Ancestors that a card names."""


def model_card(catalog: Catalog, version: Version, *, adapter: bool) -> bytes:
    """Return ``README.md``: run, step, metrics, lineage and digest of a version."""
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}", "tags:"]
    lines += ["- ckptstore", "---", "", f"# {_safe(f'{version.run}@{version.step}')}"]
    before = [one.label for one in islice(catalog.ancestors(version.id), 1, _LINEAGE + 1)]
    facts: dict[str, object] = {
        "run": version.run,
        "step": version.step,
        "version": version.id,
        "content": version.content,
        "saved": f"{version.created_at:%Y-%m-%d %H:%M:%S} UTC",
        "tags": ", ".join(version.tags),
        "kept": version.level,
        **{f"metric {name}": f"{value:.9g}" for name, value in version.metrics.items()},
        "continues": ", ".join(before),
        "metadata": json.dumps(version.metadata, sort_keys=True) if version.metadata else "",
    }
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {_safe(key)} | {_safe(value)} |" for key, value in facts.items() if value != ""]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _safe(value: object) -> str:
    """Return a text that is one cell of a table, whatever names hold."""
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", " ")
