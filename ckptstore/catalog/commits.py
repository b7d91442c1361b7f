"""Commits: the numbered records of the log, the operations that they hold, and their fold.

A commit is one JSON envelope (:mod:`ckptstore.format.framing`) around::

    {"magic":"ckptstore-commit","format":1,"number":42,"previous":"<digest of commit 41's body>",
     "write_id":"<32 hex>","at_ms":1760000000000,"by":"ana@node7 4711","ops":[{"op":"save",...}]}

An operation of an unknown name, or a higher format, is refused: what it would do to the catalog
is not known. Unknown *fields* are ignored, so that later versions may add what older ones need
not know; a field that changes what a record means comes with a new operation, format or feature.
Metrics that are not finite are the texts ``nan``, ``inf`` and ``-inf`` in JSON, and floats here.

A fold takes the catalog after commit n and commits n+1, n+2 ..., and gives the catalog after them.
It is deterministic and depends on nothing else, so every client that has read the same log has
the same catalog. An operation that breaks an invariant is an error that names its commit: no
correct writer makes one, since a writer folds its own commit before it writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from ckptstore import errors, limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Condemn, Quarantine, Relocate, SetAside, Swept, Verified
from ckptstore.catalog.lifecycle_ops import Delete, Fork, Pin, Rollback, SetPolicy, Undelete, Unpin
from ckptstore.catalog.replica_ops import NameReplica, Replicate, Replicated, UnnameReplica
from ckptstore.catalog.run_ops import Annotate, CreateRun, Declare, Save, Tag, Untag
from ckptstore.catalog.state import Fold, Op
from ckptstore.format.fields import By, CommitNumber, Id, TimeMs
from ckptstore.format.framing import UNDECODABLE, decode_envelope, encode_envelope
from ckptstore.format.keys import commit_key

MAGIC: Final = "ckptstore-commit"
FORMAT: Final = 1

OPS: Final = (
    *(CreateRun, Declare, Save, Annotate, Tag, Untag),
    *(Fork, Rollback, Delete, Undelete, Pin, Unpin, SetPolicy),
    *(Verified, Quarantine, Relocate, SetAside, Condemn, Swept),
    *(Replicate, Replicated, NameReplica, UnnameReplica),
)
"""Every operation of this format."""

_TAGS: Final = frozenset(str(op.__struct_config__.tag) for op in OPS)

if TYPE_CHECKING:
    _Known = Op
else:  # the decoder takes these and no others
    _Known = reduce(or_, OPS)


class CommitBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a commit as it is stored."""

    magic: Literal["ckptstore-commit"]
    format: Annotated[int, msgspec.Meta(ge=1, le=FORMAT)]
    number: CommitNumber
    previous: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
    """Digest of the body of the commit before, empty for the first."""
    write_id: Id
    """Random, one per attempt: tells one's own commit from another's of the same number."""
    at_ms: TimeMs
    """The writer's wall clock, in milliseconds since 1970; for people, nothing depends on it."""
    by: By
    ops: Annotated[tuple[_Known, ...], msgspec.Meta(min_length=1, max_length=limits.COMMIT_OPS_MAX)]


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit with the digest that the next one names as ``previous``."""

    body: CommitBody
    digest: str
    """BLAKE3-256 of the stored body, 64 hex digits."""

    @property
    def number(self) -> int:
        """Position in the log; the first is 1."""
        return self.body.number

    @property
    def ops(self) -> tuple[Op, ...]:
        """Its operations, in order."""
        return self.body.ops

    @property
    def follows(self) -> int:
        """Number of the commit before; any between were damaged, and are set aside."""
        first = self.ops[0]
        return first.follows if isinstance(first, SetAside) else self.number - 1

    @property
    def key(self) -> str:
        """The object that holds it."""
        return commit_key(self.body.number)


_DECODER: Final = msgspec.json.Decoder(CommitBody)


def encode_commit(body: CommitBody) -> tuple[bytes, Commit]:
    """Return the object for `body` and the commit as a reader will see it.

    What was encoded is decoded again: nothing is ever written that this version would refuse.

    Raises
    ------
    InvalidInputError
        If an operation breaks a rule of its record.
    LimitError
        If the commit passes ``COMMIT_BYTES_MAX``.
    """
    ops = tuple(op.for_json() for op in body.ops)
    data = encode_envelope(msgspec.json.encode(msgspec.structs.replace(body, ops=ops)))
    if len(data) > limits.COMMIT_BYTES_MAX:
        msg = f"the commit takes {len(data)} bytes, more than {limits.COMMIT_BYTES_MAX}"
        raise errors.LimitError(msg, hint="use less metadata")
    try:
        return data, decode_commit(data, where="the commit")
    except errors.CorruptObjectError as error:
        raise errors.InvalidInputError(f"this cannot be committed: {error.message}") from error


def decode_commit(data: bytes, *, where: str) -> Commit:
    """Check and parse one object of the log.

    Parameters
    ----------
    data
        The whole object, at most ``COMMIT_BYTES_MAX``.
    where
        The object's key, for errors. The caller compares the number in it.

    Raises
    ------
    CorruptObjectError
        If the digest, a type, a limit or a name is wrong.
    UnsupportedFeatureError
        If the format or an operation is not known to this version.
    """
    if len(data) > limits.COMMIT_BYTES_MAX:
        msg = f"{where} has {len(data)} bytes, more than {limits.COMMIT_BYTES_MAX}"
        raise errors.CorruptObjectError(msg)
    raw, digest = decode_envelope(data, where=where)
    try:
        return Commit(body=_DECODER.decode(raw), digest=digest)
    except UNDECODABLE as error:
        raise _decode_problem(raw, where, error) from error


def _decode_problem(raw: bytes, where: str, error: Exception) -> errors.CkptStoreError:
    """Tell a record of a newer version from a damaged one."""
    try:
        loose = msgspec.json.decode(raw)
        version = loose["format"]
        unknown = sorted({str(op["op"])[:40] for op in loose["ops"]} - _TAGS)
    except (*UNDECODABLE, KeyError, TypeError):
        return errors.CorruptObjectError(f"{where} is not a commit: {error}")
    if isinstance(version, int) and version > FORMAT:
        what = f"{where} has format {version}"
    elif unknown:
        what = f"{where} holds the operation {unknown[0]!r}"
    else:
        return errors.CorruptObjectError(f"{where} is not a commit: {error}")
    return errors.UnsupportedFeatureError(what, hint="a newer ckptstore wrote it: upgrade")


def extended(
    catalog: Catalog, commits: Sequence[Commit]
) -> tuple[Catalog, errors.CkptStoreError | None]:
    """Fold `commits` onto a catalog, which stays as it is.

    Returns
    -------
    tuple
        The catalog as far as the commits can be folded, each wholly or not at all, and what is
        wrong with the first that cannot, or None.
    """
    fold = Fold(catalog.state)
    for index, commit in enumerate(commits):
        try:
            _apply(fold, commit)
        except errors.IntegrityError as error:
            # The commit may have been applied in part: fold again up to the one before.
            return (extended(catalog, commits[:index])[0], error)
    return (Catalog(fold) if commits else catalog, None)


def _apply(fold: Fold, commit: Commit) -> None:
    """Fold one commit.

    Raises
    ------
    CorruptObjectError
        If it does not follow the one before, or breaks an invariant of the catalog.
    """
    if commit.follows < fold.number < commit.number:
        msg = f"the history was changed: {commit.key} sets aside what follows {commit.follows}"
        hint = "this process had read that before it was damaged: open the store again"
        raise errors.CorruptObjectError(msg, hint=hint)
    if commit.follows != fold.number or commit.number <= fold.number:
        msg = f"{commit.key} follows commit {fold.number}, but {fold.number + 1} should"
        raise errors.CorruptObjectError(msg)
    if commit.body.previous != fold.digest:
        msg = f"the history was changed: {commit.key} does not follow the digest {fold.digest!r}"
        raise errors.CorruptObjectError(msg, hint="restore the log from a replica or a backup")
    fold.number, fold.at_ms = commit.number, commit.body.at_ms
    for op in commit.ops:
        op.apply(fold)
    fold.digest = commit.digest
