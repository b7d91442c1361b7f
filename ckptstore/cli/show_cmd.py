"""``ckptstore show``: details of one version."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import best_marks
from ckptstore.cli import text
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import CommonOptions, Utc
from ckptstore.encodings.encoding import LOSSLESS
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports import documents
from ckptstore.maintenance.reports.usage import sum_roles
from ckptstore.model import Version, auto_choice

if TYPE_CHECKING:
    from ckptstore.checkpoint.content import TensorInfo

_TENSORS: Final = 10
"""Tensors in the text unless ``--tensors`` says otherwise."""
_ANCESTORS: Final = 100
"""Ancestors in the document; the text shows a few."""
_ANCESTORS_SHOWN: Final = 5


def show(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    *,
    tensors: Annotated[str | None, typer.Option(metavar="N|all")] = None,
    receipt: bool = False,
    utc: Utc = False,
    options: CommonOptions,
) -> None:
    """Show a version: metrics, tags, lineage, metadata, bytes by role, tensors.

    Parameters
    ----------
    ref
        RUN, RUN@STEP, RUN@TAG, RUN@best:METRIC, ID ...
    tensors
        Number of tensors to list; 0 skips reading the manifest. Default: 10; all with --json.
    receipt
        Also show what the save cost, and where the version lies: digest, commit, manifest.

    Examples
    --------
    ckptstore show gpt@best:val_loss
    ckptstore show gpt@1200 --tensors all --receipt
    """
    from ckptstore.checkpoint.content import read_content

    output = options.output("show")
    most = _most(tensors, default=None if options.json else _TENSORS)
    with opened(options) as opening:
        version = find_version(opening, ref)
        catalog = opening.repo.catalog
        listed = None
        if most != 0 and version.level != "record":
            listed = read_content(opening.repo.manifests.load(version)).tensors()
        best = best_marks(catalog, [catalog.run(version.run)]).get(version.id, set())
        line = list(islice(catalog.ancestors(version.id), 1, _ANCESTORS + 1))
        part = None if listed is None else listed[:most]
        view = _View(catalog, version, best, line, part, len(listed or ()), receipt, utc)
        output.show(view.document(opening.url) if options.json else {}, view.draw)


def _most(given: str | None, *, default: int | None) -> int | None:
    """Return the number of tensors to list; None for all."""
    if given is None:
        return default
    if given == "all":
        return None
    if not given.isdecimal():
        raise InvalidInputError(f"--tensors wants a number or 'all', not {given!r}")
    return int(given)


@dataclass(frozen=True, slots=True)
class _View:
    """Prints the details of a version."""

    catalog: Catalog
    version: Version
    best: set[str]
    line: Sequence[Version]
    """Its ancestors, nearest first."""
    tensors: Sequence[TensorInfo] | None
    tensors_count: int
    receipt: bool
    utc: bool

    def document(self, url: str) -> dict[str, Any]:
        """Return everything as one document."""
        version = self.version
        head = self.catalog.head_id(version.run) == version.id
        return {
            "store": url,
            "version": documents.version_document(version, head=head, best=self.best),
            "ancestors": [documents.name_document(v) for v in self.line],
            "tensors_count": None if self.tensors is None else self.tensors_count,
            "tensors": self.tensors,
        }

    def draw(self, screen: Screen) -> None:
        """Draw all sections that are not empty."""
        version = self.version
        screen.heading(f"{version.run}@{version.step}")
        screen.fields(self._fields())
        if version.metrics:
            screen.line()
            self._draw_metrics(screen)
        shown = {key: one for key, one in version.metadata.items() if key != "witness"}
        if shown:
            screen.line()
            screen.heading("METADATA")
            screen.lines(jsonlib.dumps(shown, indent=2, ensure_ascii=False).split("\n"))
        screen.line()
        self._draw_roles(screen)
        if self.tensors is not None:
            screen.line()
            self._draw_tensors(screen)
            self._draw_forms(screen)
        if self.receipt:
            self._draw_receipt(screen)

    def _draw_receipt(self, screen: Screen) -> None:
        version = self.version
        screen.line()
        screen.heading("RECEIPT")
        auto = auto_choice(version.receipt)
        entries = {"auto": auto} if auto else {}
        for name, value in version.receipt.items():
            if not name.startswith("auto_"):
                entries[name] = text.receipt_text(name, value)
        manifest = f"{version.manifest_key} ({text.bytes_text(version.manifest_bytes)})"
        if version.level == "record":
            manifest = "none: only the record is kept"
        kept = {"content": version.content, "commit": str(version.commit), "manifest": manifest}
        screen.fields({"state": version.state, **kept, **entries})

    def _fields(self) -> dict[str, str]:
        version = self.version
        head = self.catalog.head_id(version.run) == version.id
        tags = [*(["latest"] if head else []), *version.tags]
        marks = documents.state_marks(version, self.catalog.replicas)
        held = [
            f"{name} at {named.url}" if (named := self.catalog.replicas.get(name)) else name
            for name in documents.replica_names(version, self.catalog.replicas)
        ]
        shown = [text.version_text(one) for one in self.line[:_ANCESTORS_SHOWN]]
        if len(self.line) > _ANCESTORS_SHOWN:
            shown.append("...")
        saved = text.time_text(version.created_at, utc=self.utc)
        return {
            "id": version.id,
            "saved": f"{saved} ({text.version_age(version)} ago)",
            "tags": " ".join(tags) or "-",
            **({"state": ", ".join(marks)} if marks else {}),
            **({"replicas": ", ".join(held)} if held else {}),
            "continues": " <- ".join(shown) or "nothing: the first of its line",
        }

    def _draw_metrics(self, screen: Screen) -> None:
        directions = self.catalog.run(self.version.run).metrics
        screen.listing(
            sorted(self.version.metrics.items()),
            Column("METRIC", lambda item: item[0]),
            Column("VALUE", lambda item: text.metric_text(item[1]), right=True),
            Column("BETTER", lambda item: directions.get(item[0], "-")),
            Column("", lambda item: "best of the run" if item[0] in self.best else ""),
        )

    def _draw_roles(self, screen: Screen) -> None:
        roles = dict(sorted(self.version.roles.items()))
        roles["total"] = sum_roles(self.version.roles.values())
        screen.listing(
            roles.items(),
            Column("ROLE", lambda item: item[0]),
            Column("SIZE", lambda item: text.bytes_text(item[1].logical), right=True),
            Column("NEW", lambda item: text.bytes_text(item[1].new), right=True),
            Column("STORED", lambda item: text.bytes_text(item[1].stored), right=True),
        )

    def _draw_forms(self, screen: Screen) -> None:
        """Draw the encodings of tensors that are not stored losslessly as they are."""
        coded = [tensor for tensor in self.tensors or () if tensor.encoding != LOSSLESS]
        if not coded:
            return
        screen.line()
        screen.listing(
            coded,
            Column("ENCODED", lambda t: t.path),
            Column("STORED", lambda t: f"as {t.derived_from}" if t.derived_from else t.encoding),
            Column("SIZE", lambda t: text.bytes_text(t.nbytes), right=True, wrap=False, drop=3),
            Column(
                "CODED", lambda t: text.bytes_text(t.coded_bytes), right=True, wrap=False, drop=4
            ),
            Column("MAX ABS", lambda t: f"{t.max_abs:.3g}", right=True),
            Column("BOUND", lambda t: _bound(t.max_abs_bound), right=True, drop=1),
            Column("REL L2", lambda t: f"{t.rel_l2:.3g}", right=True),
            Column("BOUND", lambda t: _bound(t.rel_l2_bound), right=True, drop=2),
        )

    def _draw_tensors(self, screen: Screen) -> None:
        tensors = self.tensors or ()
        screen.listing(
            tensors,
            Column("TENSOR", lambda t: t.path),
            Column("DTYPE", lambda t: t.dtype),
            Column("SHAPE", lambda t: "x".join(map(str, t.shape)) or "scalar", right=True),
            Column("ROLE", lambda t: t.role, drop=1),
            Column("SIZE", lambda t: text.bytes_text(t.nbytes), right=True, wrap=False),
            Column("KIND", lambda t: t.kind + "".join(f" = {alias}" for alias in t.aliases)),
        )
        if more := max(0, self.tensors_count - len(tensors)):
            screen.line(f"and {text.count_text(more)} more; --tensors all lists them")


def _bound(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
