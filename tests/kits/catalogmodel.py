"""Model of a store's contents, built from the stored commits as JSON, without code of the fold."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ckptstore.backends.memory import MemoryBackend
from ckptstore.format import manifest as manifests
from ckptstore.format.keys import commit_key, pack_key

__all__ = ["CatalogModel", "Row"]


LEVELS = ["full", "weights", "weights-bf16", "weights-int8", "record"]
"""From the most that is kept to the least."""


@dataclass
class Row:
    """One version."""

    id: str
    run: str
    step: int
    parent: str
    manifest: str
    commit: int
    origin: str = ""
    """The version that it was forked from."""
    level: str = "full"
    may_round: bool = False
    """Its weights were rounded; or those of its fork's origin, before or at the fork."""
    may_lack: bool = False
    """It was forked from a version that had been reduced before, or was at the fork."""
    deleted: bool = False
    abandoned: bool = False
    """A rollback left it beside the line of its run."""
    pinned: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    """Keys of its manifest and of the packs that this names."""

    @property
    def live(self) -> bool:
        """Return whether it must load."""
        return not self.deleted and self.level != "record"


@dataclass
class CatalogModel:
    """The versions after the commits so far, and the condemned objects."""

    backend: MemoryBackend
    number: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    condemned: set[str] = field(default_factory=set)
    """Pending and swept."""
    pending: set[str] = field(default_factory=set)
    heads: dict[str, str] = field(default_factory=dict)
    """Of each run; empty where all versions were deleted."""
    tags: dict[tuple[str, str], str] = field(default_factory=dict)
    """Run and tag to the version."""
    young_s: float = 0.0
    """All retention keeps versions within this time."""
    effects: dict[int, dict[str, str]] = field(default_factory=dict)
    """Per commit: versions to the level that it left them, or ``gone``."""

    def catch_up(self) -> list[Row]:
        """Apply the new commits; return the rows that are new or changed their manifest."""
        changed: dict[str, Row] = {}
        while True:
            item = self.backend.objects.get(commit_key(self.number + 1))
            if item is None:
                return [row for row in changed.values() if row.live]
            body = json.loads(item.data)["body"]
            self.number += 1
            assert body["number"] == self.number
            for op in body["ops"]:
                for row in self._apply(op, body["ops"]):
                    changed[row.id] = row
            self._check()

    def _apply(self, op: dict[str, Any], ops: list[dict[str, Any]]) -> list[Row]:
        kind = op["op"]
        if kind == "save":
            return [self._save(op, ops)]
        if kind == "relocate":
            return self._relocate(op)
        if kind == "condemn":
            self.condemned.update(op["keys"])
            self.pending.update(op["keys"])
        elif kind == "swept":
            assert self.pending.issuperset(op["keys"])
            self.pending.difference_update(op["keys"])
        elif kind == "delete":
            self._delete(op)
        elif kind == "undelete":
            rows = [self.rows[version] for version in op["versions"]]
            for row in rows:
                assert row.deleted
                row.deleted = False
                self.heads[row.run] = self.heads[row.run] or self._newest(row.run)
            return rows
        elif kind == "rollback":
            assert not self.rows[op["version"]].deleted
            left, kept = self._line(self.heads[op["run"]]), self._line(op["version"])
            for row in (*left, *kept):
                row.abandoned = row not in kept
            self.heads[op["run"]] = op["version"]
        elif kind in {"pin", "unpin"}:
            row = self.rows[op["version"]]
            assert kind == "unpin" or not row.deleted
            row.pinned = kind == "pin"
        elif kind == "annotate":
            self.rows[op["version"]].metrics |= op.get("metrics", {})
        elif kind == "tag":
            self.tags[op["run"], op["tag"]] = op["version"]
        elif kind == "untag":
            del self.tags[op["run"], op["tag"]]
        return []

    def _save(self, op: dict[str, Any], ops: list[dict[str, Any]]) -> Row:
        fork = [other for other in ops if other["op"] == "fork" and other["run"] == op["run"]]
        key = op["manifest"]["key"]
        row = Row(op["version"], op["run"], op["step"], op["parent"], key, self.number)
        row.metrics = dict(op.get("metrics", {}))
        if fork:
            assert op["parent"] == fork[0]["source"]
            source = self.rows[fork[0]["source"]]
            row.origin = source.id
            row.may_lack = source.may_lack or source.level != "full"
            row.may_round = source.may_round
        assert row.id not in self.rows
        self.rows[row.id] = row
        self.heads[row.run] = row.id
        return self._read(row)

    def _relocate(self, op: dict[str, Any]) -> list[Row]:
        row = self.rows[op["version"]]
        # Two clients may both evict all but the record: the second changes nothing.
        assert row.live or (not row.deleted and op["level"] == "record")
        level = f"weights-{op['encoding']}" if op.get("encoding") else op["level"]
        if level != row.level:
            assert not row.pinned, f"{row.id} is pinned, and lost a part"
            assert LEVELS.index(level) > LEVELS.index(row.level)
            self._note(row, level)
        row.level = level
        row.may_round = row.may_round or level.startswith("weights-")
        if op["manifest"] is None:
            row.needs = frozenset()
            return []
        row.manifest = op["manifest"]["key"]
        return [self._read(row)]

    def _delete(self, op: dict[str, Any]) -> None:
        by_policy = op.get("reason") == "retention"
        named = set(self.tags.values())
        for version in op["versions"]:
            row = self.rows[version]
            assert not row.deleted
            assert not row.pinned, f"{row.id} is pinned, and was deleted"
            if by_policy:
                age_s = self._stored_s(self.number) - self._stored_s(row.commit)
                assert age_s >= self.young_s, f"{row.id} was deleted {age_s} s after it came"
                assert self.heads[row.run] != row.id, f"{row.id} is a head"
                assert row.id not in named, f"{row.id} is tagged"
            row.deleted = True
            self._note(row, "gone")
        for version in op["versions"]:
            run = self.rows[version].run
            if self.heads[run] == version:
                self.heads[run] = self._newest(run)

    def _line(self, version: str) -> list[Row]:
        """Return a version and those before it in its run, through deleted ones."""
        row = self.rows.get(version)
        if row is None:
            return []
        parent = self.rows.get(row.parent)
        return [row, *(self._line(row.parent) if parent and parent.run == row.run else ())]

    def _newest(self, run: str) -> str:
        """Return the version that a run goes on from: the last one, abandoned ones after all."""
        left = [row for row in self.rows.values() if row.run == run and not row.deleted]
        return max(left, key=lambda row: (not row.abandoned, row.commit)).id if left else ""

    def _stored_s(self, number: int) -> float:
        """Return when a commit was stored, by the storage's clock."""
        return self.backend.objects[commit_key(number)].modified_at

    def _note(self, row: Row, fate: str) -> None:
        self.effects.setdefault(self.number, {})[row.id] = fate

    def _read(self, row: Row) -> Row:
        """Read a version's needed objects from its manifest as stored."""
        item = self.backend.objects.get(row.manifest)
        if item is None:  # a later commit replaced it; if none did, its objects count as unneeded
            row.needs = frozenset({row.manifest})
            return row
        table = manifests.decode(item.data, where=row.manifest, version=row.id).pieces
        used = {pack_key(table.packs[int(place)]) for place in table.pack}
        row.needs = frozenset({row.manifest, *used})
        return row

    def _check(self) -> None:
        """Check after each commit that no live version names a condemned object."""
        for row in self.rows.values():
            if row.live:
                assert not row.needs & self.condemned, f"{row.id} names what was condemned"

    def reach(self) -> set[str]:
        """Return the objects that live versions need."""
        return {key for row in self.rows.values() if row.live for key in row.needs}
