"""Documents of one version, of two compared, and of the values of one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ckptstore.catalog import retention
from ckptstore.catalog.best_marks import best_marks
from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.format.keys import pack_key
from ckptstore.maintenance.core.storage_times import StorageTimes
from ckptstore.maintenance.reports.documents import diff_document, name_document, version_document
from ckptstore.model import Version, auto_choice
from ckptstore.pages.thinning import rounded
from ckptstore.store import Store

if TYPE_CHECKING:
    import torch

    from ckptstore.checkpoint.content import Content

_TENSORS_MAX: Final = 2000
"""Tensors of a document; a search finds the others."""
_PACKS_MAX: Final = 50
_RELATIVES_MAX: Final = 20
_VALUES_MAX: Final = 500
_VALUE_CHARS_MAX: Final = 200
_ELEMENTS_MAX: Final = 1 << 24
"""Elements of a tensor that are counted: 128 MiB of memory."""
_BINS: Final = 60


def version(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a version with its tensors, its relatives, its packs and its fate.

    Parameters
    ----------
    query
        ``ref``: an id or any ref; ``search``: a part of the paths of tensors.
    """
    catalog = store.repo.refresh()
    ref = query.get("ref", "")
    one = catalog.version(ref) if catalog.has_version(ref) else store.resolve(ref)
    info = catalog.run(one.run)
    (plan,) = retention.plan(catalog, run=one.run, times=StorageTimes(store.repo))
    fate = next((each for each in plan.decisions if each.version.id == one.id), None)
    head = info.head == one.id
    return {
        "version": version_document(
            one, head=head, best=best_marks(catalog, [info]).get(one.id, ())
        ),
        "directions": info.metrics,
        "codec": auto_choice(one.receipt),
        "ancestors": [
            name_document(each) for each in islice(catalog.ancestors(one.id), 1, _RELATIVES_MAX + 1)
        ],
        "children": _children(catalog, one),
        "replicas": [
            msgspec.to_builtins(each)
            for each in catalog.replicas.values()
            if each.store in one.replicas
        ],
        "retention": {
            "policy": str(plan.policy) if plan.policy else "",
            "refused": plan.refused,
            "fate": fate.fate if fate else one.level,
            "reasons": fate.reasons if fate else (),
            "reclaimable_bytes": fate.reclaimable_bytes if fate else 0,
        },
        **_stored(store, one, query.get("search", "")),
    }


def _children(catalog: Catalog, one: Version) -> list[dict[str, Any]]:
    rows = catalog.state.versions.values()
    found = (row.id for row in rows if row.parent == one.id)
    return [name_document(catalog.version(each)) for each in islice(found, _RELATIVES_MAX)]


def _stored(store: Store, one: Version, search: str) -> dict[str, Any]:
    """Return tensors and packs by the manifest; of a version without one, why."""
    from ckptstore.checkpoint.content import read_content

    if one.level == "record":
        return {"unread": "only its record is kept"}
    try:
        content = read_content(store.repo.manifests.load(one))
    except CkptStoreError as error:  # what the catalog knows is shown all the same
        return {"unread": error.message}
    tensors = content.tensors()
    wanted = [each for each in tensors if search.lower() in each.path.lower()]
    return {
        "tensors_count": len(tensors),
        "matching_count": len(wanted),
        "tensors": wanted[:_TENSORS_MAX],
        **_packs(content),
    }


def _packs(content: Content) -> dict[str, Any]:
    """Return the packs that a version is read from, and its bytes in each, most first."""
    import numpy as np

    table = content.manifest.pieces
    # Small pieces share a chunk: it counts once.
    chunks = np.stack([table.pack.astype(np.uint64), table.offset])
    _, first = np.unique(chunks, axis=1, return_index=True)
    sizes = np.bincount(table.pack[first], weights=table.stored[first], minlength=len(table.packs))
    order = np.argsort(-sizes, kind="stable")[:_PACKS_MAX]
    return {
        "packs_count": len(table.packs),
        "packs": [{"key": pack_key(table.packs[at]), "bytes": int(sizes[at])} for at in order],
    }


def diff(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the comparison of the versions ``first`` and ``second``, two ids, by digest."""
    refs = [query.get(name, "") for name in ("first", "second")]
    catalog = store.repo.refresh()
    report = store.diff(*(f"#{ref}" if catalog.has_version(ref) else ref for ref in refs))
    found = diff_document(report, {})
    found["values_count"] = len(report.values)
    found["tensors"] = found["tensors"][:_TENSORS_MAX]
    found["values"] = [
        {"path": x.path, "before": x.before[:_VALUE_CHARS_MAX], "after": x.after[:_VALUE_CHARS_MAX]}
        for x in report.values[:_VALUES_MAX]
    ]
    return found


def values(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a histogram of the tensor ``path`` of the version ``ref``; reads this tensor alone.

    Of a very large one, a part from its beginning.
    """
    from ckptstore.states.lazy import SLICEABLE  # imports torch, which files do not need

    lazy = store.version(query.get("ref", ""))[query.get("path", "")]
    total = math.prod(lazy.shape)
    box, left = [], _ELEMENTS_MAX
    for place, size in enumerate(lazy.shape):
        rest = math.prod(lazy.shape[place + 1 :])
        box.append(slice(0, min(size, max(1, left // max(1, rest)))))
        left = max(1, left // max(1, box[-1].stop)) if rest <= left else left
    whole = total <= _ELEMENTS_MAX and lazy._leaf.kind not in SLICEABLE
    part = lazy.load() if whole else lazy[tuple(box)]
    numbers = _numbers(part)
    return {
        "path": lazy.path,
        "elements": max(total, numbers.numel()),
        "counted": numbers.numel(),
        **_histogram(numbers),
    }


def _numbers(part: Any) -> torch.Tensor:  # noqa: ANN401 - whatever a leaf loads as
    """Return the values of a leaf as float64: of complex ones the magnitudes, else each byte."""
    import numpy as np
    import torch

    if isinstance(part, torch.Generator):
        part = part.get_state()
    if isinstance(part, torch.Tensor):
        flat = (part.dequantize() if part.is_quantized else part).detach().reshape(-1)
        return (flat.abs() if flat.is_complex() else flat).to(torch.float64)
    if isinstance(part, bytes | bytearray):
        part = np.frombuffer(part, np.uint8)
    if not isinstance(part, np.ndarray):
        msg = f"a leaf that loads as {type(part).__name__} has no values to count"
        raise InvalidInputError(msg)
    if part.dtype.kind not in "biufc":
        part = np.frombuffer(part.tobytes(), np.uint8)
    values = np.abs(part) if part.dtype.kind == "c" else part
    return torch.from_numpy(values.ravel().astype(np.float64))


def _histogram(numbers: torch.Tensor) -> dict[str, Any]:
    finite = numbers[numbers.isfinite()]
    if not finite.numel():
        return {"nonfinite": numbers.numel(), "counts": []}
    low, high = finite.min().item(), finite.max().item()
    counts = finite.histc(_BINS, low, high) if low < high else finite.new_full((1,), len(finite))
    return {
        "nonfinite": numbers.numel() - finite.numel(),
        "zeros": int((finite == 0).sum()),
        "low": rounded(low),
        "high": rounded(high),
        "mean": rounded(finite.mean().item()),
        "deviation": rounded(finite.std(correction=0).item()),
        "counts": [int(count) for count in counts],
    }
