"""Each form of a ref and each listing, beside a version with each flag of the catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args, get_type_hints

import pytest
import torch
from damaging import flip_object

from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import content_ops
from ckptstore.errors import CorruptTensorError, VersionNotFoundError
from ckptstore.format.keys import pack_key
from ckptstore.format.snapshot import Flag
from ckptstore.maintenance.core.select_versions import select_versions
from ckptstore.model import Ref, Version
from ckptstore.repo import create_on
from ckptstore.store import Store

FORMS = {
    "latest": "r", "step": "r@3", "tag": "r@t", "back": "r@~0", "back 1": "r@~1",
    "best": "r@best:loss", "valid": "r@latest-valid", "id": "#{0}",
}  # fmt: skip
"""Refs of each kind: all but ``~1`` name the head."""


def _flag(store: Store, name: str, head: Version) -> None:
    """Do what sets a flag of the head, or several."""
    ref, lost = f"#{head.id}", {head.id: head.manifest_digest}
    for word in name.split():
        match word:
            case "DELETED":
                store.remove([ref], force=True)
            case "UNDELETED":
                store.undelete([ref])
            case "B-DELETED":
                store.remove(["r@2"], force=True)
            case "ABANDONED":
                store.rollback("r@2")
            case "PINNED":
                store.pin(ref)
            case "VERIFIED":
                store.verify([ref], record=True)
            case "LOST":
                for pack in store.repo.manifests.load(head).pieces.packs:
                    flip_object(store.repo.backend, pack_key(pack))
            case "DAMAGED":
                store.repo.log.append(lambda now: content_ops.quarantine(now, lost))
            case "WEIGHTS_ONLY":
                store.age([ref], "weights", force=True)
            case "RECORD_ONLY":
                store.age([ref], "record", force=True)


LISTINGS: dict[str, Callable[[Store], Iterable[Version]]] = {
    "versions": lambda store: store.versions(),
    "with content": lambda store: select_versions(store.repo),
    "tags": lambda store: [store.repo.catalog.version(v) for v in store.runs()[0].tags.values()],
    "line": lambda store: store.repo.catalog.ancestors(store.runs()[0].head),
    "last 2": lambda store: select_versions(store.repo, rules="last 2"),
    "best 1": lambda store: select_versions(store.repo, rules="best 1 loss"),
    "tagged": lambda store: select_versions(store.repo, rules="tagged"),
}

TABLE = {
    # forms: the version that each names; small: it does not load; -: there is none
    "": ("SSSSBSSS", "ABCS ABCS S SBA BS S S"),
    "PINNED": ("SSSSBSSS", "ABCS ABCS S SBA BS S S"),
    "VERIFIED": ("SSSSBSSS", "ABCS ABCS S SBA BS S S"),
    "WEIGHTS_ONLY": ("SSSSBSSS", "ABCS ABCS S SBA BS S S"),
    "RECORD_ONLY": ("ssssBBBs", "ABCS ABC S SBA AB B -"),
    "DELETED": ("BC-BABB-", "ABC ABC - BA AB B -"),
    "DELETED UNDELETED": ("SSSSBSSS", "ABCS ABCS S SBA BS S S"),
    "DELETED B-DELETED": ("AC-A-AA-", "AC AC - A A A -"),
    "B-DELETED": ("SSSSASSS", "ACS ACS S SBA AS S S"),
    "ABANDONED": ("BSSBABBS", "ABCS ABCS S BA AB B S"),
    "ABANDONED DELETED": ("BC-BABB-", "ABC ABC - BA AB B -"),
    "LOST": ("ssssBsBs", "ABCS ABCS S SBA BS S S"),
    "LOST DAMAGED": ("ssssBsBs", "ABCS ABCS S SBA AB B S"),
    "DAMAGED VERIFIED": ("SSSSBSSS", "ABCS ABCS S SBA BS S S"),
}


def test_the_table_is_complete() -> None:
    """A kind of ref or a flag that is added needs its column or its rows."""
    kinds = get_args(get_type_hints(Ref)["kind"])
    assert {name.split()[0] for name in FORMS} == set(kinds)
    flags = {name for name in vars(Flag) if name.isupper() and name != "ALL"}
    assert flags <= {word for row in TABLE for word in row.split()}
    assert all(len(forms) == len(FORMS) for forms, _ in TABLE.values())


@pytest.mark.parametrize("flags", TABLE)
def test_each_form_and_each_listing(memory: MemoryBackend, flags: str) -> None:
    """Forms and listings agree about a version that has a flag, here the head S of a run.

    Before S come A and B, and C, which a rollback to B left: newer than B, better, of S's step.
    """
    with Store(create_on(memory)) as store:
        run = store.run("r", metrics={"loss": "min"})
        for name, step, loss in (("A", 1, 3.0), ("B", 2, 2.0), ("C", 3, 1.5), ("S", 3, 1.0)):
            if name == "S":
                run.rollback(2)
            weights, moments = torch.full((9,), loss), torch.full((9,), -loss)
            head = run.save(
                {"model": {"w": weights}, "optimizer": {"m": moments}}, step=step,
                metrics={"loss": loss}, metadata={"name": name}, tags=["t"] if name == "S" else (),
            )  # fmt: skip
        _flag(store, flags, head)
    store = Store(create_on(memory, exist_ok=True))
    named = "".join(_named(store, form.format(head.id)) for form in FORMS.values())
    listed = ["".join(map(_name, listing(store))) or "-" for listing in LISTINGS.values()]
    assert (named, " ".join(listed)) == TABLE[flags]
    versions, info = store.versions(), store.runs()[0]
    assert store.run("r").versions() == versions
    assert info.head == store.resolve("r").id == store.run("r").resolve("latest").id
    assert len(versions) == info.versions_count == store.verify(level="records").versions_count
    deleted = list(store.repo.catalog.versions(deleted=True))
    assert sorted(map(_name, [*versions, *deleted])) == list("ABCS")


def _name(version: Version) -> str:
    return str(version.metadata["name"])


def _named(store: Store, ref: str) -> str:
    """Return the version that a ref names, small if it does not load."""
    try:
        name = _name(store.resolve(ref))
    except VersionNotFoundError:
        with pytest.raises(VersionNotFoundError):
            store.load(ref)
        return "-"
    try:
        loaded = store.load(ref)
    except (CorruptTensorError, VersionNotFoundError):
        return name.lower()
    assert float(loaded["model"]["w"][0]) == store.resolve(ref).metrics["loss"]
    return name
