"""Records of commits: every bit counts; a commit is written once, or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import limits
from ckptstore.backends.base import Backend, Buffer, ObjectInfo
from ckptstore.backends.memory import MemoryBackend, open_memory
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog.commits import CommitBody, decode_commit, encode_commit
from ckptstore.catalog.run_ops import Annotate, CreateRun, Declare, Save, Tag, Untag
from ckptstore.catalog.state import Op
from ckptstore.committing import commit_retrying, put_once
from ckptstore.config import SYSTEM
from ckptstore.errors import (
    AmbiguousWriteError,
    CkptStoreError,
    CommitConflictError,
    CondemnedError,
    CorruptObjectError,
    InvalidInputError,
    LimitError,
    ObjectExistsError,
    ObjectNotFoundError,
    UnsupportedFeatureError,
)
from ckptstore.format.fields import ManifestPointer, RoleSizes
from ckptstore.format.framing import encode_envelope
from ckptstore.format.keys import (
    commit_key,
    commit_number,
    manifest_key,
    pack_id,
    pack_key,
    snapshot_key,
    snapshot_number,
    version_id_of,
)
from ckptstore.format.names import check_metric_name, check_run_name, check_tag, encode_metadata

ID = "0123456789abcdef" * 2
SAVE = Save(
    version=ID, run="gpt", step=7, parent="",
    manifest=ManifestPointer(key=manifest_key(ID), stored_bytes=10, digest="a" * 64),
    content="b" * 64, metrics={"loss": 1.5}, tags=["v1"], metadata=msgspec.Raw(b'{"lr":0.1}'),
    roles={"weights": RoleSizes(logical=1, new=2, stored=3)}, receipt={"durable_s": 0.5},
)  # fmt: skip


def body(*ops: Op, number: int = 1) -> CommitBody:
    """Return a commit body around operations."""
    return CommitBody(
        magic="ckptstore-commit", format=1, number=number, previous="" if number == 1 else "c" * 64,
        write_id=ID, at_ms=1_700_000_000_000, by="ana@node7 4711", ops=ops,
    )  # fmt: skip


def hostile(**changes: Any) -> bytes:  # noqa: ANN401 - any JSON
    """Return a commit with a sound digest whose first operation, or body, is changed."""
    data, _ = encode_commit(body(SAVE))
    record = json.loads(data)["body"]
    for name, value in changes.items():
        target = record if name in record else record["ops"][0]
        target[name] = value
    return encode_envelope(json.dumps(record).encode())


@pytest.mark.parametrize(
    "op",
    [
        SAVE, CreateRun(run="a/b=1", metrics={"loss": "min", "acc@5": "max"}),
        Declare(run="gpt", metrics={"bleu": "max"}), Annotate(version=ID, metrics={"bleu": 31.0}),
        Tag(run="gpt", tag="release-1", version=ID), Untag(run="gpt", tag="release-1"),
    ],
    ids=lambda op: type(op).__name__,
)  # fmt: skip
def test_every_operation_survives(op: Op) -> None:
    """An operation comes back equal, with number, digest and write id."""
    data, commit = encode_commit(body(op, number=42))
    again = decode_commit(data, where="k")
    assert again.digest == commit.digest
    assert again.number == 42
    assert again.body.write_id == ID
    assert encode_commit(again.body)[0] == data


def test_save_fields_survive() -> None:
    """All fields of a save come back, user metadata byte for byte."""
    op = decode_commit(encode_commit(body(SAVE))[0], where="k").ops[0]
    assert isinstance(op, Save)
    assert bytes(op.metadata) == b'{"lr":0.1}'
    for name in ("version", "run", "step", "manifest", "content", "metrics", "roles", "receipt"):
        assert getattr(op, name) == getattr(SAVE, name)


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(), min_size=1))
def test_metrics_of_any_float_survive(metrics: dict[str, float]) -> None:
    """NaN and infinities are texts in JSON and floats again when read."""
    data, _ = encode_commit(body(Annotate(version=ID, metrics=metrics)))
    assert b"NaN" not in data
    assert b"Infinity" not in data
    op = decode_commit(data, where="k").ops[0]
    assert isinstance(op, Annotate)
    assert {k: str(float(v)) for k, v in op.metrics.items()} == {
        k: str(v) for k, v in metrics.items()
    }


def test_metrics_that_are_not_finite_are_texts_in_json() -> None:
    """The stored form is the one that the format page gives."""
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    data, _ = encode_commit(body(Annotate(version=ID, metrics=metrics)))
    stored = json.loads(data)["body"]["ops"][0]["metrics"]
    assert stored == {"a": "nan", "b": "inf", "c": "-inf", "d": 1.0}


def test_every_bit_of_a_commit_counts() -> None:
    """Any single flipped bit is an error that names the key."""
    data, _ = encode_commit(body(SAVE))
    for bit in range(8 * len(data)):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptObjectError, match="commits/x"):
            decode_commit(bytes(torn), where="commits/x")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"magic": "other"}, CorruptObjectError),
        ({"format": 2}, UnsupportedFeatureError),
        ({"format": 0}, CorruptObjectError),
        ({"format": "1"}, CorruptObjectError),
        ({"op": "teleport"}, UnsupportedFeatureError),
        ({"ops": []}, CorruptObjectError),
        ({"ops": [{"op": "untag", "run": "a", "tag": "b"}] * 1025}, CorruptObjectError),
        ({"ops": "save"}, CorruptObjectError),
        ({"ops": [7]}, CorruptObjectError),
        ({"number": 0}, CorruptObjectError),
        ({"number": -1}, CorruptObjectError),
        ({"number": 10**9}, CorruptObjectError),
        ({"number": 10**30}, CorruptObjectError),
        ({"number": 1.5}, CorruptObjectError),
        ({"previous": "zz"}, CorruptObjectError),
        ({"write_id": "short"}, CorruptObjectError),
        ({"at_ms": 10**18}, CorruptObjectError),
        ({"by": "x" * 301}, CorruptObjectError),
        ({"version": "../../etc/passwd"}, CorruptObjectError),
        ({"version": ID.upper()}, CorruptObjectError),
        ({"version": ID + "\n"}, CorruptObjectError),
        ({"run": ""}, CorruptObjectError),
        ({"run": "a@b"}, CorruptObjectError),
        ({"run": "../up"}, CorruptObjectError),
        ({"run": "\x1b[31mred"}, CorruptObjectError),
        ({"run": "a" * 201}, CorruptObjectError),
        ({"step": -1}, CorruptObjectError),
        ({"step": 2**63}, CorruptObjectError),
        ({"step": True}, CorruptObjectError),
        ({"parent": "x"}, CorruptObjectError),
        ({"tags": ["1200"]}, CorruptObjectError),
        ({"tags": ["latest"]}, CorruptObjectError),
        ({"tags": [f"t{i}" for i in range(101)]}, CorruptObjectError),
        ({"metrics": {"a": "NaN"}}, CorruptObjectError),
        ({"metrics": {"a": None}}, CorruptObjectError),
        ({"metrics": {"\n": 1.0}}, CorruptObjectError),
        ({"metrics": {f"m{i}": 1.0 for i in range(1001)}}, CorruptObjectError),
        ({"metadata": [1]}, CorruptObjectError),
        ({"metadata": {"a": "x" * limits.METADATA_BYTES_MAX}}, CorruptObjectError),
        ({"metadata": {"a": json.loads("[" * 40 + "]" * 40)}}, CorruptObjectError),
        ({"roles": {"w": {"logical": -1, "new": 0, "stored": 0}}}, CorruptObjectError),
        ({"roles": {"w": {}}}, CorruptObjectError),
        ({"receipt": {"a_s": "nan"}}, CorruptObjectError),
        ({"content": "b" * 63}, CorruptObjectError),
        (
            {"manifest": {"key": "packs/00/x.pack", "bytes": 1, "blake3": "a" * 64}},
            CorruptObjectError,
        ),
        (
            {"manifest": {"key": manifest_key(ID), "bytes": -1, "blake3": "a" * 64}},
            CorruptObjectError,
        ),
        (
            {"manifest": {"key": f"manifests/ff/{ID}.manifest", "bytes": 1, "blake3": "a" * 64}},
            CorruptObjectError,
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_hostile_commits_are_refused(changes: dict[str, Any], error: type[CkptStoreError]) -> None:
    """A record with a sound digest and wrong content raises the right kind, naming the key."""
    with pytest.raises(error, match="commits/x"):
        decode_commit(hostile(**changes), where="commits/x")


def test_deep_nesting_does_not_reach_the_recursion_limit() -> None:
    """A body of a million brackets is an error of ours, not a crash."""
    for bomb in (b"[" * 1_000_000, b'{"ops":' + b"[" * 1_000_000, b'{"a":' * 1_000_000):
        with pytest.raises(CorruptObjectError):
            decode_commit(encode_envelope(bomb), where="k")


def test_bytes_that_are_not_utf8_are_refused() -> None:
    """Names must be text."""
    data, _ = encode_commit(body(SAVE))
    raw = json.loads(data)["body"]
    torn = json.dumps(raw).encode().replace(b'"by": "ana', b'"by": "\xff\xfe')
    with pytest.raises(CorruptObjectError):
        decode_commit(encode_envelope(torn), where="k")


def test_an_oversized_commit_is_refused() -> None:
    """Whatever it says, a commit beyond its limit is not parsed."""
    with pytest.raises(CorruptObjectError, match="more than"):
        decode_commit(b" " * (limits.COMMIT_BYTES_MAX + 1), where="k")


def test_unknown_fields_are_ignored() -> None:
    """A later version may add what this one need not know."""
    data, _ = encode_commit(body(SAVE))
    record = json.loads(data)["body"]
    record["extra"] = {"a": [1]}
    record["ops"][0]["extra"] = 1
    op = decode_commit(encode_envelope(json.dumps(record).encode()), where="k").ops[0]
    assert isinstance(op, Save)
    assert op.manifest == SAVE.manifest


def test_what_a_reader_would_refuse_is_not_written() -> None:
    """Limits that the record types leave to the decoder hold when writing, too."""
    with pytest.raises(InvalidInputError, match="cannot be committed"):
        encode_commit(body(msgspec.structs.replace(SAVE, step=-1)))
    with pytest.raises(InvalidInputError, match="cannot be committed"):
        encode_commit(body())
    with pytest.raises(InvalidInputError):
        Tag(run="gpt", tag="latest", version=ID)


def test_a_commit_beyond_the_limit_is_not_written() -> None:
    """The writer meets the limit before the reader does."""
    raw = msgspec.Raw(json.dumps({"a": "x" * 200_000}).encode())
    saves = [msgspec.structs.replace(SAVE, version=f"{i:032x}", metadata=raw) for i in range(22)]
    with pytest.raises(LimitError, match="less metadata"):
        encode_commit(body(*saves))


@pytest.mark.parametrize(
    "name", ["gpt", "exp/2024-07/lr=1e-4", "a", "9", "_x", "Größe", "模型", "v1.2+cu", "a:b,c"]
)
def test_run_names_of_practice_are_accepted(name: str) -> None:
    """Names that people give are accepted, in any script."""
    assert check_run_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", " ", "a b", "a\n", "a@b", "#a", "~a", "-a", ".", "..", "a/../b", "a//b", "a/", "/a",
        "a\x00", "a" * 201, "é", "\u202ea", "a\u200b",
    ],
)  # fmt: skip
def test_run_names_that_would_confuse_are_refused(name: str) -> None:
    """Names that clash with refs, paths or terminals are refused."""
    with pytest.raises(InvalidInputError):
        check_run_name(name)


@pytest.mark.parametrize(
    "tag", ["", "1200", "latest", "best", "best:x", "~1", "#a", "a@b", "latest-valid", "x" * 101]
)
def test_tags_that_are_other_refs_are_refused(tag: str) -> None:
    """A tag cannot be a step, a reserved word, or an id."""
    with pytest.raises(InvalidInputError):
        check_tag(tag)


@pytest.mark.parametrize("name", ["", " a", "a ", "a\tb", "\x7f", "x" * 201])
def test_metric_names_must_print(name: str) -> None:
    """Control characters and spaces at the ends are refused."""
    with pytest.raises(InvalidInputError):
        check_metric_name(name)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_metadata_survives_a_commit(metadata: dict[str, Any]) -> None:
    """Any JSON object that is accepted comes back equal; text that is no Unicode is refused."""
    try:
        text = encode_metadata(metadata)
    except InvalidInputError:
        with pytest.raises(UnicodeEncodeError):
            json.dumps(metadata, ensure_ascii=False).encode()
        return
    data, _ = encode_commit(body(msgspec.structs.replace(SAVE, metadata=msgspec.Raw(text))))
    op = decode_commit(data, where="k").ops[0]
    assert isinstance(op, Save)
    assert msgspec.json.decode(bytes(op.metadata)) == metadata


@pytest.mark.parametrize(
    ("metadata", "path"),
    [
        ({"a": {"b": [1, math.nan]}}, r"metadata\.a\.b\[1\]"),
        ({"a": {1: 2}}, "metadata.a"),
        ({"a": object()}, "metadata.a"),
        ({"a": {1, 2}}, "metadata.a"),
        ({"a": b"bytes"}, "metadata.a"),
    ],
)
def test_metadata_that_json_would_lose_is_refused(metadata: dict[str, Any], path: str) -> None:
    """The error names the path."""
    with pytest.raises(InvalidInputError, match=path):
        encode_metadata(metadata)


def test_metadata_limits() -> None:
    """Too deep and too large is refused; a cycle is too deep."""
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    with pytest.raises(LimitError, match="nested"):
        encode_metadata(cyclic)
    with pytest.raises(LimitError, match="bytes"):
        encode_metadata({"a": "x" * limits.METADATA_BYTES_MAX})


@given(st.integers(1, limits.COMMIT_NUMBER_MAX), st.integers(1, limits.COMMIT_NUMBER_MAX))
def test_keys_sort_as_numbers(a: int, b: int) -> None:
    """Listing in key order is listing in number order, and a key gives its number back."""
    assert (commit_key(a) < commit_key(b)) == (a < b)
    assert (snapshot_key(a) < snapshot_key(b)) == (a < b)
    assert commit_number(commit_key(a)) == a
    assert snapshot_number(snapshot_key(a)) == a


def test_keys_are_the_documented_ones() -> None:
    """The layout is that of the format page."""
    assert commit_key(42) == "commits/000000/000000000042.json"
    assert commit_key(1000) == "commits/000001/000000001000.json"
    assert snapshot_key(100) == "snapshots/000000000100.snap"
    assert manifest_key(ID) == f"manifests/01/{ID}.manifest"
    assert pack_key(ID) == f"packs/01/{ID}.pack"
    assert version_id_of(manifest_key(ID)) == pack_id(pack_key(ID)) == ID


@pytest.mark.parametrize(
    "key",
    [
        "commits/000001/000000000042.json", "commits/000000/000000000000.json", "commits/42.json",
        "commits/000000/000000000042.json.tmp", "snapshots/1.snap", "packs/ff/" + ID + ".pack",
    ],
)  # fmt: skip
def test_foreign_keys_are_not_taken_for_ours(key: str) -> None:
    """A key in the wrong folder or form has no number and no id."""
    assert commit_number(key) is None
    assert snapshot_number(key) is None
    assert pack_id(key) is None


def test_bad_numbers_and_ids_make_no_key() -> None:
    """Numbers out of range and ids that are none are refused when writing."""
    for number in (-1, limits.COMMIT_NUMBER_MAX + 1):
        with pytest.raises(InvalidInputError):
            commit_key(number)
    with pytest.raises(InvalidInputError):
        pack_key("../x")


T = TypeVar("T")
FIRST, SECOND = "1" * 32, "2" * 32


def condemned(*keys: str) -> CondemnedError:
    """Return the error of a commit that relied on condemned objects."""
    error = CondemnedError("condemned")
    error.keys = frozenset(keys)
    return error


def test_each_try_is_given_all_packs_that_were_condemned_before_it() -> None:
    """A try avoids the packs of every earlier error; keys of manifests are no packs."""
    errors = [
        condemned(pack_key(FIRST)),
        condemned(manifest_key(FIRST)),
        condemned(pack_key(SECOND)),
    ]
    given: list[set[str]] = []

    def attempt(packs: set[str]) -> str:
        given.append(set(packs))
        if errors:
            raise errors.pop(0)
        return "done"

    assert commit_retrying(attempt) == "done"
    assert given == [set(), {FIRST}, {FIRST}, {FIRST, SECOND}]


def test_the_last_try_lets_its_error_through() -> None:
    """Collections that condemn again and again end the commit with the error of the last try."""
    raised: list[CondemnedError] = []

    def attempt(_: set[str]) -> None:
        raised.append(condemned(pack_key(FIRST)))
        raise raised[-1]

    with pytest.raises(CondemnedError) as caught:
        commit_retrying(attempt)
    assert len(raised) == limits.CONDEMNED_TRIES_MAX
    assert caught.value is raised[-1]


def test_another_error_is_raised_at_once() -> None:
    """Only a condemned object is a reason to write again."""
    tries: list[None] = []

    def attempt(_: set[str]) -> None:
        tries.append(None)
        raise CommitConflictError("others were faster")

    with pytest.raises(CommitConflictError, match="faster"):
        commit_retrying(attempt)
    assert len(tries) == 1


class StaleListing(WrapperBackend):
    """Some creations fail, with nothing stored; a listing shows the name all the same."""

    def __init__(self, inner: Backend, errors: list[Exception]) -> None:
        super().__init__(inner)
        self.errors = errors

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if self.errors:
            raise self.errors.pop(0)
        super().put_if_absent(key, data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(key=prefix, size_bytes=1, modified_at=0.0)])


def test_an_object_that_is_only_listed_is_sent_again() -> None:
    """What a stale listing names, and cannot be read, is not stored: the same bytes are sent."""
    backend = StaleListing(open_memory("memory://stale"), [AmbiguousWriteError("lost")])
    assert put_once(backend, "store.json", b"mine", SYSTEM, bytes_max=10) == b"mine"
    assert backend.get("store.json", bytes_max=10) == b"mine"


@pytest.mark.parametrize(
    "errors",
    [
        [AmbiguousWriteError("lost") for _ in range(limits.COMMIT_SENDS_MAX)],
        [ObjectExistsError("taken")],
    ],
    ids=["lost", "taken"],
)
def test_an_object_that_cannot_be_read_back_is_not_known_to_be_written(
    errors: list[Exception],
) -> None:
    """Never success, and never "not there": the storage said that another has created it."""
    backend = StaleListing(open_memory("memory://unread"), errors)
    with pytest.raises(AmbiguousWriteError, match="not known whether"):
        put_once(backend, "store.json", b"mine", SYSTEM, bytes_max=10)


class Unreadable(WrapperBackend):
    """Says that a write was lost, or that the name is taken; lists it, and cannot read it."""

    def __init__(self, inner: MemoryBackend, error: type[Exception]) -> None:
        super().__init__(inner)
        self.error = error

    def around(self, call: str, key: str, action: Callable[[], T], size_bytes: int = 0) -> T:
        """Fail a write after it was done, and each read as a cached lookup would."""
        if call == "get":
            raise ObjectNotFoundError(f"{key} is not there")
        found = action()
        if call == "put_if_absent":
            raise self.error("lost")
        return found


@pytest.mark.parametrize("error", [ObjectExistsError, AmbiguousWriteError])
def test_an_object_that_is_listed_and_cannot_be_read_stays_unclear(error: type[Exception]) -> None:
    """It is no missing object to the caller: whether it was written is not known."""
    backend = Unreadable(MemoryBackend("unreadable"), error)
    with pytest.raises(AmbiguousWriteError, match="not known whether"):
        put_once(backend, "store.json", b"ours", SYSTEM, bytes_max=100)
