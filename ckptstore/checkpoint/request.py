"""What the catalog is to say of a version: asked for, checked, and as operations of a commit."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import msgspec

from ckptstore.catalog import run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import check_metrics
from ckptstore.catalog.state import Op
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key
from ckptstore.format.names import check_listed, encode_metadata
from ckptstore.model import RoleBytes

NOWHERE: Final = ManifestPointer(key=manifest_key("0" * 32), stored_bytes=0, digest="0" * 64)
"""Where no manifest lies: for the trial that refuses bad names before a byte is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """Arguments of a save by ranks or of one state: what the catalog says of the version."""

    run: str
    step: int
    directions: Mapping[str, str] = field(default_factory=dict)
    """Which way each metric gets better, for a run that is new."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    codec: str = "auto"
    derive: bool = True
    """Tensors that are another one, rounded, are stored as recipes."""

    def plain(self) -> WriteRequest:
        """Return these arguments alone, as values of their own that a pickle can hold.

        Raises
        ------
        InvalidInputError, LimitError
            A metric, or the metadata, is not accepted; or `tags` is a single text.
        """
        step = self.step
        if not isinstance(step, bool):
            with contextlib.suppress(TypeError):  # what is no integer is refused with the rest
                step = operator.index(step)
        own = {each.name: getattr(self, each.name) for each in fields(WriteRequest)}
        return replace(
            WriteRequest(**own),
            step=step,
            directions=dict(self.directions),
            metrics=check_metrics(self.metrics),
            tags=tuple(check_listed(self.tags, "tags")),
            metadata=msgspec.json.decode(encode_metadata(self.metadata)),
        )


def check_wishes(catalog: Catalog, request: WriteRequest, *, version: str = "0" * 32) -> None:
    """Raise now what the commit would raise for a name, a metric, a tag, metadata or a step.

    Parameters
    ----------
    version
        The id that it is to have, if that is known.

    Raises
    ------
    InvalidInputError, LimitError
        One of them is not accepted.
    """
    save_ops(
        catalog,
        request,
        version=version,
        pointer=NOWHERE,
        content="0" * 64,
        roles={},
        receipt={},
        relies_on=(),
    )


def save_ops(
    catalog: Catalog,
    request: WriteRequest,
    *,
    version: str,
    pointer: ManifestPointer,
    content: str,
    roles: Mapping[str, RoleBytes],
    receipt: Mapping[str, float],
    relies_on: Collection[str],
) -> list[Op]:
    """Return the operations that make a version visible; see :mod:`ckptstore.catalog.run_ops`."""
    return run_ops.save(
        catalog,
        run=request.run,
        version=version,
        step=request.step,
        manifest=pointer,
        content=content,
        directions=request.directions,
        metrics=request.metrics,
        tags=request.tags,
        metadata=request.metadata,
        roles=roles,
        receipt=receipt,
        relies_on=relies_on,
    )
