"""Descriptions of the operations of the log, for people."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable
from typing import Any, Final

import msgspec

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Condemn, Quarantine, Relocate, SetAside, Swept, Verified
from ckptstore.catalog.lifecycle_ops import Delete, Fork, Pin, Rollback, SetPolicy, Undelete, Unpin
from ckptstore.catalog.replica_ops import NameReplica, Replicate, Replicated, UnnameReplica
from ckptstore.catalog.run_ops import Annotate, CreateRun, Declare, Save, Tag, Untag
from ckptstore.catalog.state import Op
from ckptstore.cli.text import bytes_text, counted, listed, metric_text, version_text
from ckptstore.errors import CkptStoreError
from ckptstore.format.keys import PACKS_PREFIX
from ckptstore.shown import parts_text

_NAMED: Final = 5
"""Versions that one operation names."""


def describe(op: Op, catalog: Catalog) -> str:
    """Return what an operation did; its name is shown beside it."""
    return _DESCRIBE[type(op)](op, catalog)


def _metrics(metrics: Any) -> str:  # noqa: ANN401 - a mapping of names to floats
    return ", ".join(f"{name} {metric_text(value)}" for name, value in metrics.items())


def _save(op: Save, _: Catalog) -> str:
    new = bytes_text(sum(part.stored for part in op.roles.values()))
    tags = "".join(f" +{tag}" for tag in op.tags)
    metrics = f", {_metrics(op.metrics)}" if op.metrics else ""
    return f"{op.run}@{op.step} {op.version[:8]}{tags}, {new} stored{metrics}"


def _annotate(op: Annotate, catalog: Catalog) -> str:
    told = [_metrics(op.metrics)] if op.metrics else []
    for name, value in jsonlib.loads(bytes(op.metadata)).items():
        if name == "resumed" and isinstance(value, dict):
            names = f": {listed(value.get('names', []), most=_NAMED)}" if value.get("names") else ""
            steps = value.get("steps")
            after = "after 1 step" if steps == 1 else f"after {steps} steps"
            at = after if steps else "in what was restored"
            told.append(f"resumed, {value.get('verdict')} {at}{names}")
        else:
            told.append(f"{name}: {value}" if name == "note" else name)
    return f"{_named(op.version, catalog)}: {', '.join(told)}"


def _directions(op: CreateRun | Declare, _: Catalog) -> str:
    known = ", ".join(f"{name}: {direction}" for name, direction in op.metrics.items())
    return f"{op.run} ({known})" if known else op.run


def _replica(op: NameReplica | UnnameReplica, _: Catalog) -> str:
    return (
        f"{op.name} is {op.url}, store {op.store[:8]}" if isinstance(op, NameReplica) else op.name
    )


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _pin(op: Pin | Unpin, catalog: Catalog) -> str:
    whose = f" for {_store(op.store, catalog)}" if op.store else ""
    return _named(op.version, catalog) + whose


def _store(store: str, catalog: Catalog) -> str:
    """Return what another store is called here."""
    names = [name for name, one in catalog.replicas.items() if one.store == store]
    return names[0] if names else f"store {store[:8]}"


def _replicate(op: Replicate, catalog: Catalog) -> str:
    what = "" if op.level == "full" else f", its {op.level} alone"
    return f"{op.run}@{op.step} {op.version[:8]} from {_store(op.store, catalog)}{what}"


def _policy(op: SetPolicy, _: Catalog) -> str:
    found = msgspec.json.decode(op.policy, type=dict[str, Any])
    return f"{op.run or 'all runs'}: {_rules(found) if found else 'no policy'}"


def _rules(policy: dict[str, Any]) -> str:
    from ckptstore.catalog.policy import Policy  # reads forms, and needs NumPy

    try:
        return str(Policy.from_json(policy))
    except CkptStoreError:  # of a later version: shown as it is, since nothing is done by it here
        return jsonlib.dumps(policy)


def _relocate(op: Relocate, catalog: Catalog) -> str:
    kept = {"full": "lies elsewhere", "weights": "keeps its weights", "record": "keeps its record"}
    text = f"{_named(op.version, catalog)} {kept[op.level]}"
    text += f" as {op.encoding}" if op.encoding else ""
    return f"{text}; dropped {parts_text(op.dropped)}" if op.dropped else text


def _versions(op: Verified | Quarantine | Delete | Undelete | Replicated, catalog: Catalog) -> str:
    """Name the first few of the versions that an operation is about."""
    found = [catalog.version(v) for v in op.versions[:_NAMED] if catalog.has_version(v)]
    return listed([version_text(v) for v in found], most=_NAMED, count=len(op.versions))


def _named(version_id: str, catalog: Catalog) -> str:
    found = catalog.find(version_id)
    return version_id[:8] if found is None else version_text(found)


def _objects(op: Condemn | Swept, _: Catalog) -> str:
    packs = sum(key.startswith(PACKS_PREFIX) for key in op.keys)
    counts = {"pack": packs, "manifest": len(op.keys) - packs}
    return ", ".join(counted(count, kind) for kind, count in counts.items() if count)


_DESCRIBE: Final[dict[type, Callable[[Any, Catalog], str]]] = {
    CreateRun: _directions,
    Declare: _directions,
    Save: _save,
    Annotate: _annotate,
    Tag: lambda op, _: f"{op.run}@{op.tag} is {op.version[:8]}",
    Untag: lambda op, _: f"{op.run}@{op.tag}",
    Replicate: _replicate,
    Replicated: lambda op, catalog: f"{_store(op.store, catalog)} has {_versions(op, catalog)}",
    Fork: lambda op, catalog: f"{op.run} from {_named(op.source, catalog)}",
    Rollback: lambda op, catalog: f"{op.run} to {_named(op.version, catalog)}{_because(op.reason)}",
    Delete: lambda op, catalog: _versions(op, catalog) + _because(op.reason),
    Undelete: _versions,
    Pin: _pin,
    Unpin: _pin,
    SetPolicy: _policy,
    Relocate: _relocate,
    SetAside: lambda op, _: f"the records after commit {op.follows}{_because(op.reason)}",
    Condemn: _objects,
    Swept: _objects,
    Verified: _versions,
    Quarantine: _versions,
    NameReplica: _replica,
    UnnameReplica: _replica,
}
"""Type of an operation to the function that describes it."""
