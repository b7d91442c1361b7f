"""The page of a store: paths to answers, for any server. Reads only; all paths are relative.

::

    /, /page              the page
    /page/page.js, .css   its assets
    /page/NAME.json       a document; errors have ``error``, ``hint`` and ``kind``

Texts of the store reach a reader as JSON alone, and the script writes them as text, never as HTML.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ckptstore.catalog import retention
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.content_ops import Condemn, Swept, Verified
from ckptstore.catalog.metrics import best_marks
from ckptstore.catalog.state import Op
from ckptstore.errors import CkptStoreError, InvalidInputError, NotFoundError
from ckptstore.format.keys import pack_key
from ckptstore.maintenance.core.storage_times import StorageTimes
from ckptstore.maintenance.reports import documents
from ckptstore.maintenance.reports.usage import replica_lags
from ckptstore.model import Version, auto_choice
from ckptstore.pages.run_documents import RUNS_MAX, lineage, overview, rounded, run
from ckptstore.store import Store

if TYPE_CHECKING:
    import torch

    from ckptstore.checkpoint.content import Content

__all__ = ["PageAnswer", "page"]


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
    catalog, ref = store.repo.refresh(), query.get("ref", "")
    one = catalog.version(ref) if catalog.has_version(ref) else store.resolve(ref)
    info = catalog.run(one.run)
    (plan,) = retention.plan(catalog, run=one.run, times=StorageTimes(store.repo))
    fate = next((each for each in plan.decisions if each.version.id == one.id), None)
    best = best_marks(catalog, [info]).get(one.id, ())
    held = [each for each in catalog.replicas.values() if each.store in one.replicas]
    line = islice(catalog.ancestors(one.id), 1, _RELATIVES_MAX + 1)
    return {
        "version": documents.version_document(one, head=info.head == one.id, best=best),
        "directions": info.metrics,
        "codec": auto_choice(one.receipt),
        "ancestors": [documents.name_document(each) for each in line],
        "children": _children(catalog, one),
        "replicas": msgspec.to_builtins(held),
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
    found = islice((row.id for row in rows if row.parent == one.id), _RELATIVES_MAX)
    return [documents.name_document(catalog.version(each)) for each in found]


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
    found = documents.diff_document(report, {})
    found["values_count"] = len(report.values)
    found["tensors"] = found["tensors"][:_TENSORS_MAX]
    found["values"] = [
        {"path": x.path, "before": x.before[:_VALUE_CHARS_MAX], "after": x.after[:_VALUE_CHARS_MAX]}
        for x in report.values[:_VALUES_MAX]
    ]
    return found


_alone: Final = threading.Lock()
"""Of the tensor whose values are counted: each takes some of its size in float64."""


def values(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a histogram of the tensor ``path`` of the version ``ref``; reads this tensor alone.

    Of a very large one, a part from its beginning.
    """
    from ckptstore.states.lazy import SLICEABLE  # imports torch, which files do not need

    lazy = store.version(query.get("ref", ""))[query.get("path", "")]
    total, kind = math.prod(lazy.shape), lazy._leaf.kind
    if total > _ELEMENTS_MAX and kind not in {*SLICEABLE, "view"}:
        raise InvalidInputError(f"{lazy.path} has too many elements to read it whole")
    box, left = [], _ELEMENTS_MAX
    for place, size in enumerate(lazy.shape):
        rest = math.prod(lazy.shape[place + 1 :])
        box.append(slice(0, min(size, max(1, left // max(1, rest)))))
        left = max(1, left // max(1, box[-1].stop)) if rest <= left else left
    whole = total <= _ELEMENTS_MAX and kind not in SLICEABLE
    with _alone:
        numbers = _numbers(lazy.load() if whole else lazy[tuple(box)])
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


_DAY_MS: Final = 86_400_000
_AGES: Final = {"a day": 1, "a week": 7, "30 days": 30, "a year": 365, "more": 1 << 40}
"""Upper bounds of ages, in days."""
_COMMITS: Final = 100
"""Newest commits that are searched for a verification and a collection."""
_COMMITS_SHOWN: Final = 30
_DAMAGED_MAX: Final = 50


def storage(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return bytes by run, role, age and level, as counted by the saves."""
    versions = list(store.repo.refresh().versions())
    groups: dict[str, list[Version]] = {}
    ages: dict[str, list[Version]] = {age: [] for age in _AGES}
    now_ms = store.repo.environment.now_ms()
    for one in versions:
        groups.setdefault(one.run, []).append(one)
        days = (now_ms - one.created_at.timestamp() * 1000) / _DAY_MS
        ages[next(age for age, most in _AGES.items() if days <= most)].append(one)
    runs = [{"name": run, **_bytes(group)} for run, group in groups.items()]
    runs.sort(key=lambda run: -run["stored_bytes"])
    return {
        **_bytes(versions),
        "runs_count": len(runs),
        "runs": runs[:RUNS_MAX],
        "ages": [{"name": age, **_bytes(group)} for age, group in ages.items()],
        "levels": Counter(one.level for one in versions),
    }


def _bytes(versions: Sequence[Version]) -> dict[str, Any]:
    return {"versions": len(versions), **documents.bytes_document(versions)}


def health(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the last verification and collection, lags of replicas and the newest commits."""
    catalog = store.repo.refresh()
    commits = store.log(first=max(1, catalog.number - _COMMITS + 1))
    versions = list(catalog.versions())
    damaged = [one for one in versions if one.damaged]
    return {
        "versions": len(versions),
        "verified": sum(one.verified for one in versions),
        "damaged_count": len(damaged),
        "damaged": [documents.name_document(one) for one in damaged[:_DAMAGED_MAX]],
        "deleted": sum(1 for _ in catalog.versions(deleted=True)),
        "condemned": len(catalog.condemned),
        "commits_read": len(commits),
        "last_verify": _last(commits, Verified),
        "last_gc": _last(commits, Condemn, Swept),
        "replicas": [
            {
                **documents.lag_document(lag),
                "missing_bytes": lag.missing_bytes,
                "oldest_ms": lag.oldest and round(lag.oldest.created_at.timestamp() * 1000),
            }
            for lag in replica_lags(catalog)
        ],
        "commits": [
            {
                "number": commit.number,
                "at_ms": commit.body.at_ms,
                "by": commit.body.by,
                "what": ", ".join(dict.fromkeys(map(_what, commit.ops[:_COMMITS_SHOWN]))),
            }
            for commit in commits[: -_COMMITS_SHOWN - 1 : -1]
        ],
    }


def _last(commits: Iterable[Commit], *kinds: type[Op]) -> dict[str, int] | None:
    """Return number and time of the newest of some commits with an operation of these kinds."""
    found = [one for one in commits if any(isinstance(op, kinds) for op in one.ops)]
    return {"number": found[-1].number, "at_ms": found[-1].body.at_ms} if found else None


def _what(op: Op) -> str:
    return f"{op.__struct_config__.tag} {getattr(op, 'run', '')}".rstrip()


Document = Callable[[Store, Mapping[str, str]], dict[str, Any]]
_MAKERS: Final = (overview, run, lineage, version, values, diff, storage, health)
DOCUMENTS: Final[Mapping[str, Document]] = {maker.__name__: maker for maker in _MAKERS}
_JSON: Final = "application/json"
_ASSETS: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page": ("page.html", "text/html; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswer:
    """One answer, for any server."""

    status: int
    media_type: str
    body: bytes


def page(opening: Store, path: str, query: Mapping[str, str]) -> PageAnswer | None:
    """Return the answer to a request of the page; None for paths that are not its own.

    Safe from any thread, as the store is. Errors are answers too: 400 for an invalid request, 404
    for names that do not exist, 503 if the storage fails or data is damaged.
    """
    if path in _ASSETS:
        name, media_type = _ASSETS[path]
        return PageAnswer(status=200, media_type=media_type, body=asset(name))
    found = DOCUMENTS.get(path.removeprefix("/page/").removesuffix(".json"))
    if found is None or path != f"/page/{found.__name__}.json":
        return None
    try:
        return PageAnswer(status=200, media_type=_JSON, body=encoded(found(opening, query)))
    except CkptStoreError as error:
        asked = isinstance(error, InvalidInputError)
        status = 400 if asked else 404 if isinstance(error, NotFoundError) else 503
        said = {"error": error.message, "hint": error.hint, "kind": error.kind}
        return PageAnswer(status=status, media_type=_JSON, body=encoded(said))


def asset(name: str) -> bytes:
    """Return a file of the page."""
    return files("ckptstore.pages").joinpath(name).read_bytes()


def encoded(document: Mapping[str, Any]) -> bytes:
    """Return a document as JSON; paths may hold lone surrogates, which UTF-8 has not."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(document, str_keys=True)).encode()
