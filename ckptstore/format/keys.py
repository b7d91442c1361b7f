"""Where each object of a store lies: the key layout of format v1.

::

    store.json                              superblock
    commits/000000/000000000042.json        the log; folder = number // 1000
    snapshots/000000000100.snap             folded catalog at that commit; a cache
    manifests/<xx>/<id>.manifest            one per version
    packs/<xx>/<id>.pack                    chunks
    references/000000000100-<8 hex>.refs    packs that live manifests name; a cache of collections
    keys/000000000001.json                  wrapped keys of an encrypted store; the newest counts
    published.json, index.html              index and page of a published store; may be missing

Ids are 32 lower-case hex digits (128 random bits) and never used again; ``<xx>`` is their first
two. Numbers are padded so that keys sort as numbers do.
"""

from __future__ import annotations

import re
from typing import Final

from ckptstore import limits
from ckptstore.argument_checks import integer
from ckptstore.errors import InvalidInputError

STORE_KEY: Final = "store.json"
COMMITS_PREFIX: Final = "commits/"
SNAPSHOTS_PREFIX: Final = "snapshots/"
MANIFESTS_PREFIX: Final = "manifests/"
PACKS_PREFIX: Final = "packs/"
OBJECT_PREFIXES: Final = (COMMITS_PREFIX, SNAPSHOTS_PREFIX, MANIFESTS_PREFIX, PACKS_PREFIX)
"""Everything below these belongs to the store, and is encrypted if the store is."""
REFERENCES_PREFIX: Final = "references/"
"""A cache beside them, encrypted too; says nothing of whether there is a store."""
KEYS_PREFIX: Final = "keys/"
"""As ``store.json``, what is below it belongs to the store and is never encrypted."""

PUBLISHED_KEY: Final = "published.json"
PAGE_KEY: Final = "index.html"
CLEAR_KEYS: Final = frozenset({STORE_KEY, PUBLISHED_KEY, PAGE_KEY})
"""Objects beside those below ``keys/`` that are never encrypted."""

ID_PATTERN: Final = r"^[0-9a-f]{32}\Z"
MANIFEST_KEY_PATTERN: Final = r"^manifests/([0-9a-f]{2})/(\1[0-9a-f]{30})\.manifest\Z"

_ID = re.compile(ID_PATTERN)
_COMMIT = re.compile(r"commits/([0-9]{6})/([0-9]{12})\.json\Z")
_KEY_RECORD = re.compile(r"keys/([0-9]{12})\.json\Z")
_SNAPSHOT = re.compile(r"snapshots/([0-9]{12})\.snap\Z")
_REFERENCES = re.compile(r"references/[0-9]{12}-[0-9a-f]{8}\.refs\Z")
_MANIFEST = re.compile(MANIFEST_KEY_PATTERN)
_PACK = re.compile(r"packs/([0-9a-f]{2})/(\1[0-9a-f]{30})\.pack\Z")


def commit_key(number: int) -> str:
    """Return the key of commit `number`; the first commit is 1, and 0 sorts before all.

    Raises
    ------
    InvalidInputError
        If the number does not fit the key.
    """
    return f"commits/{_checked(number) // limits.COMMITS_PER_FOLDER:06d}/{number:012d}.json"


def commit_number(key: str) -> int | None:
    """Return the number of the commit at `key`, or None where `key` names no commit."""
    match = _COMMIT.match(key)
    if match is None:
        return None
    number = int(match[2])
    return number if number and number // limits.COMMITS_PER_FOLDER == int(match[1]) else None


def key_record_key(number: int) -> str:
    """Return the key of record `number` of wrapped keys; the first is 1."""
    return f"{KEYS_PREFIX}{_checked(number):012d}.json"


def key_record_number(key: str) -> int | None:
    """Return the number of the record of wrapped keys at `key`, or None."""
    match = _KEY_RECORD.match(key)
    return int(match[1]) or None if match else None


def snapshot_key(number: int) -> str:
    """Return the key of the catalog snapshot that folds commits 1 to `number`."""
    return f"snapshots/{_checked(number):012d}.snap"


def snapshot_number(key: str) -> int | None:
    """Return the number of the commit that the snapshot at `key` folds to, or None."""
    match = _SNAPSHOT.match(key)
    return int(match[1]) if match else None


def references_key(number: int, suffix: str) -> str:
    """Return the key of the reference record that a collection writes after commit `number`.

    Parameters
    ----------
    suffix
        8 random hex digits: one record may replace another of the same number.
    """
    return f"{REFERENCES_PREFIX}{_checked(number):012d}-{suffix}.refs"


def is_references_key(key: str) -> bool:
    """Return whether `key` names a reference record."""
    return _REFERENCES.match(key) is not None


def manifest_key(version_id: str) -> str:
    """Return the key of the manifest that is written with version `version_id`."""
    return f"manifests/{_checked_id(version_id)[:2]}/{version_id}.manifest"


def version_id_of(key: str) -> str | None:
    """Return the id in a manifest's key, or None where `key` names no manifest."""
    match = _MANIFEST.match(key)
    return match[2] if match else None


def pack_key(pack_id: str) -> str:
    """Return the key of pack `pack_id`."""
    return f"packs/{_checked_id(pack_id)[:2]}/{pack_id}.pack"


def pack_id(key: str) -> str | None:
    """Return the id in a pack's key, or None where `key` names no pack."""
    match = _PACK.match(key)
    return match[2] if match else None


def _checked(number: int) -> int:
    return integer("the number of a commit", number, 0, limits.COMMIT_NUMBER_MAX)


def _checked_id(value: str) -> str:
    if not _ID.match(value):
        raise InvalidInputError(f"not an id of 32 lower-case hex digits: {value[:80]!r}")
    return value
