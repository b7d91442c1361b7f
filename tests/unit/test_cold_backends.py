"""Storage classes: cold objects are told, thawed, and mended."""

from __future__ import annotations

import pickle
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest
import torch
from buckets import AzureBucket, GcsBucket, S3Bucket
from coldbackend import ColdBackend, Shelf
from metered import MeteredBackend

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends.azure import AzureColdStorage
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.gcs import GcsColdStorage
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.registry import open_backend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.backends.s3 import S3ColdStorage
from ckptstore.backends.storage_classes import (
    CLASSES,
    STANDARD,
    ColdStorage,
    check_pack_class,
    class_named,
    is_classed,
)
from ckptstore.format.keys import OBJECT_PREFIXES, PACKS_PREFIX, STORE_KEY, pack_key
from ckptstore.repo import create_on, open_on

KEY = pack_key("a" * 32)


@pytest.fixture(params=["direct", "s3fs"])
def backend(s3_bucket: S3Bucket, request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Return a backend of S3 by either client, without retries, with a pack in it."""
    backend = open_backend(s3_bucket.url, retry=False, client=request.param, **s3_bucket.options())
    s3_bucket.write(KEY, b"chunks")
    yield backend
    backend.close()


def _cold(backend: Backend) -> ColdStorage:
    cold = backend.cold_storage()
    assert cold is not None
    return cold


def _assert_cold(backend: Backend, warmer: str) -> None:
    """Assert that reads and changes of the class are refused, and not as what passes."""
    cold = _cold(backend)
    assert cold.restore_state(KEY).access == "cold"
    for read in (
        lambda: backend.get(KEY, bytes_max=100),
        lambda: backend.read_into(KEY, 0, [memoryview(bytearray(3))]),
        lambda: cold.set_class(KEY, warmer),
    ):
        with pytest.raises(errors.ColdObjectError) as caught:
            read()
        assert not isinstance(caught.value, errors.TransientStorageError)


def test_an_object_changes_class(backend: Backend, s3_bucket: S3Bucket) -> None:
    """The listing and the state tell it, the bytes are what they were, and once is enough."""
    cold = _cold(backend)
    assert cold.restore_state(KEY).storage_class == STANDARD
    assert cold.set_class(KEY, "STANDARD_IA")
    assert not cold.set_class(KEY, "STANDARD_IA")
    assert cold.restore_state(KEY).storage_class == backend.stat(KEY).storage_class == "STANDARD_IA"
    assert [info.storage_class for info in backend.list(PACKS_PREFIX)] == ["STANDARD_IA"]
    assert s3_bucket.read(KEY) == b"chunks"


def test_what_is_cold_is_refused_until_it_is_restored(backend: Backend) -> None:
    """By an error that no retry takes for one that passes; a second request is no failure."""
    cold = _cold(backend)
    cold.set_class(KEY, "GLACIER")
    _assert_cold(backend, STANDARD)
    assert cold.request_restore(KEY, days=3, tier="Bulk")
    state = cold.restore_state(KEY)
    assert state.is_readable
    assert state.storage_class == "GLACIER"
    assert state.restored_until is not None
    assert backend.get(KEY, bytes_max=100) == b"chunks"
    cold.request_restore(KEY, days=3, tier="Bulk")
    assert cold.set_class(KEY, STANDARD)
    assert cold.restore_state(KEY).access == "readable"


def test_what_is_not_there_is_told(backend: Backend) -> None:
    """Neither a state nor a class of it, and nothing to restore."""
    cold = _cold(backend)
    gone = pack_key("b" * 32)
    for ask in (
        lambda: cold.restore_state(gone),
        lambda: cold.set_class(gone, "GLACIER"),
        lambda: cold.request_restore(gone, days=1, tier="Bulk"),
    ):
        with pytest.raises(errors.ObjectNotFoundError):
            ask()
    with pytest.raises(errors.StorageError, match="no such class"):
        cold.set_class(KEY, "NO_CLASS")


def test_only_packs_are_written_in_a_class(s3_bucket: S3Bucket) -> None:
    """Whatever key a writer or a put has: the superblock and all records stay where they belong."""
    backend = open_backend(s3_bucket.url, pack_class="ONEZONE_IA", **s3_bucket.options())
    names = [STORE_KEY, *(f"{prefix}aa/x" for prefix in OBJECT_PREFIXES)]
    for name in names:
        with backend.open_writer(name) as writer:
            writer.write(b"bytes")
            writer.commit()
    backend.put("manifests/aa/y", b"bytes")
    backend.put_if_absent("commits/000000/y", b"bytes")
    classes = {info.key: info.storage_class for info in backend.list("")}
    assert classes.pop(f"{PACKS_PREFIX}aa/x") == "ONEZONE_IA"
    assert set(classes.values()) == {STANDARD}
    again: Backend = pickle.loads(pickle.dumps(backend))  # noqa: S301 - as a saver has it
    with again.open_writer(KEY) as writer:
        writer.write(b"bytes")
        writer.commit()
    assert backend.stat(KEY).storage_class == "ONEZONE_IA"
    for opened in (backend, again):
        opened.close()


def test_classes_of_new_packs_can_be_read_at_once() -> None:
    """One that needs a restore is refused, and so is a name that is none."""
    assert check_pack_class(None) == check_pack_class("") == ""
    assert check_pack_class("GLACIER_IR") == "GLACIER_IR"
    assert check_pack_class("EC_COLD") == "EC_COLD"  # of an administrator
    for wrong in ("GLACIER", "DEEP_ARCHIVE", "no class", 3):
        with pytest.raises(errors.InvalidInputError):
            check_pack_class(wrong)


def test_the_only_prefix_of_classes_is_that_of_packs() -> None:
    """What backends take for packs is what the format calls so."""
    assert [prefix for prefix in OBJECT_PREFIXES if is_classed(prefix)] == [PACKS_PREFIX]
    assert not is_classed(STORE_KEY)


def test_the_table_of_classes_holds_together() -> None:
    """Tiers have times from and to; what is not known is readable and free to leave."""
    for name, known in CLASSES.items():
        assert known.name == name
        assert all(0 < low < high for low, high in known.tiers.values())
        assert known.is_archive == (name in {"GLACIER", "DEEP_ARCHIVE", "Archive"})
    assert class_named("").name == class_named("Hot").name == STANDARD
    other = class_named("EC_COLD")
    assert (other.is_archive, other.min_days, other.min_bytes) == (False, 0, 0)


class _Calls:
    """A client of S3 that answers what it is told."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self.head = dict(head)
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def call(self, method: str, request: dict[str, Any]) -> Any:  # noqa: ANN401
        self.sent.append((method, request))
        return self.head if method == "head_object" else {}


def _s3(head: Mapping[str, Any]) -> tuple[S3ColdStorage, _Calls]:
    from datetime import UTC, datetime

    whole = {"ContentLength": 10, "LastModified": datetime(2026, 3, 1, tzinfo=UTC), **head}
    calls = _Calls(whole)
    client: Any = calls

    def request(key: str) -> dict[str, Any]:
        return {"Bucket": "bucket", "Key": f"place/{key}"}

    one_at_a_time = threading.Lock()

    def send(_: str, work: Callable[[Any], Any]) -> Any:  # noqa: ANN401
        """Call as a storage with room for one request: another one within it would wait forever."""
        assert one_at_a_time.acquire(blocking=False)
        try:
            return work(client)
        finally:
            one_at_a_time.release()

    return S3ColdStorage(request, send), calls


def test_a_copy_is_conditional_on_what_was_seen() -> None:
    """So that a second one, sent after a lost answer, is no copy within the new class."""
    cold, calls = _s3({})
    with pytest.raises(errors.StorageError, match="does this storage have the class"):
        cold.set_class(KEY, "STANDARD_IA")  # and a server that forgets the class is noticed
    (copy,) = [request for method, request in calls.sent if method == "copy_object"]
    assert copy["CopySourceIfUnmodifiedSince"] == calls.head["LastModified"]
    assert "CopySourceIfMatch" not in copy  # with both, S3 would copy all the same
    assert copy["CopySource"] == {"Bucket": "bucket", "Key": f"place/{KEY}"}


@pytest.mark.parametrize("moved", [True, False])
def test_a_refused_copy_within_one_class_is_looked_at(moved: bool) -> None:
    """If another client has moved the object there it is no error; else the refusal is told."""
    cold, calls = _s3({})
    real = calls.call

    def call(method: str, request: dict[str, Any]) -> Any:  # noqa: ANN401 - an answer
        if method == "copy_object":
            if moved:
                calls.head = calls.head | {"StorageClass": "STANDARD_IA"}
            answer = {"Error": {"Code": "InvalidRequest"}}
            raise botocore.exceptions.ClientError(answer, "CopyObject")
        return real(method, request)

    calls.call = call  # type: ignore[method-assign]
    if moved:
        assert not cold.set_class(KEY, "STANDARD_IA")
    else:
        with pytest.raises(errors.StorageError, match="InvalidRequest"):
            cold.set_class(KEY, "STANDARD_IA")


def test_an_object_too_large_for_a_copy_is_refused() -> None:
    """With what can move it; and no pack is so large."""
    cold, calls = _s3({"ContentLength": limits.S3_COPY_BYTES_MAX + 1})
    with pytest.raises(errors.LimitError, match="lifecycle"):
        cold.set_class(KEY, "STANDARD_IA")
    assert [method for method, _ in calls.sent] == ["head_object"]
    assert limits.PACK_BYTES_MAX < limits.S3_COPY_BYTES_MAX


@pytest.mark.parametrize(
    ("head", "access"),
    [
        ({}, "readable"),
        ({"StorageClass": "STANDARD_IA"}, "readable"),
        ({"StorageClass": "GLACIER_IR"}, "readable"),
        ({"StorageClass": "GLACIER"}, "cold"),
        ({"StorageClass": "GLACIER", "Restore": 'ongoing-request="true"'}, "restoring"),
        ({"StorageClass": "DEEP_ARCHIVE", "Restore": 'ongoing-request="false"'}, "restored"),
        ({"StorageClass": "INTELLIGENT_TIERING"}, "readable"),
        ({"StorageClass": "INTELLIGENT_TIERING", "ArchiveStatus": "ARCHIVE_ACCESS"}, "cold"),
    ],
)
def test_states_are_read_from_a_head(head: dict[str, str], access: str) -> None:
    """As AWS documents them, the archive tiers of intelligent tiering included."""
    assert _s3(head)[0].restore_state(KEY).access == access


def test_intelligent_tiering_is_asked_without_days() -> None:
    """S3 refuses days there: the object comes back for good."""
    cold, calls = _s3({"StorageClass": "INTELLIGENT_TIERING", "ArchiveStatus": "ARCHIVE_ACCESS"})
    cold.request_restore(KEY, days=7, tier="Standard")
    assert calls.sent[-1][1]["RestoreRequest"] == {"GlacierJobParameters": {"Tier": "Standard"}}
    cold, calls = _s3({"StorageClass": "GLACIER"})
    cold.request_restore(KEY, days=7, tier="Bulk")
    assert calls.sent[-1][1]["RestoreRequest"]["Days"] == 7


def test_gcs_writes_packs_in_a_class(gcs_bucket: GcsBucket) -> None:
    """And tells it; a server that rewrites without the class is noticed."""
    backend = open_backend(gcs_bucket.url, pack_class="NEARLINE", **gcs_bucket.options())
    with backend.open_writer(KEY) as writer:
        writer.write(b"chunks")
        writer.commit()
    backend.put("manifests/aa/x", b"bytes")
    backend.put_if_absent("commits/000000/x", b"bytes")
    classes = {info.key: info.storage_class for info in backend.list("")}
    assert classes.pop(KEY) == "NEARLINE"
    assert set(classes.values()) == {STANDARD}
    cold = _cold(backend)
    state = cold.restore_state(KEY)
    assert (state.storage_class, state.access) == ("NEARLINE", "readable")
    assert not cold.request_restore(KEY, days=1, tier="Standard")
    with pytest.raises(errors.StorageError, match="afterwards"):  # fake-gcs-server forgets it
        cold.set_class(KEY, "COLDLINE")
    assert backend.get(KEY, bytes_max=100) == b"chunks"
    backend.close()


def test_gcs_rewrites_large_objects_in_several_requests() -> None:
    """With the token of the answer before, until the storage says that it is done."""
    tokens: list[str] = []
    found = {"class": STANDARD}

    def stat(key: str) -> ObjectInfo:
        name = found["class"]
        return ObjectInfo(key=key, size_bytes=1, modified_at=0.0, storage_class=name)

    def rewrite(key: str, name: str, token: str) -> Mapping[str, Any]:
        assert key == KEY
        tokens.append(token)
        if len(tokens) < 3:
            return {"done": False, "rewriteToken": f"t{len(tokens)}"}
        found["class"] = name
        return {"done": True}

    cold = GcsColdStorage(stat, rewrite)
    assert cold.set_class(KEY, "ARCHIVE")
    assert tokens == ["", "t1", "t2"]
    assert not cold.set_class(KEY, "ARCHIVE")


def test_azure_sets_tiers(azure_bucket: AzureBucket) -> None:
    """Azurite keeps them, refuses to read what is archived, and rehydrates at once."""
    backend = open_backend(azure_bucket.url, retry=False, **azure_bucket.options())
    azure_bucket.write(KEY, b"chunks")
    cold = _cold(backend)
    assert cold.restore_state(KEY).storage_class == STANDARD
    for name in ("Cool", "Cold", "Archive"):
        assert cold.set_class(KEY, name)
        assert not cold.set_class(KEY, name)
        assert backend.stat(KEY).storage_class == cold.restore_state(KEY).storage_class == name
        assert [info.storage_class for info in backend.list(PACKS_PREFIX)] == [name]
        assert azure_bucket.tiers() == {KEY: name}
    _assert_cold(backend, "Cool")
    assert cold.request_restore(KEY, days=3, tier="High")
    assert not cold.request_restore(KEY, days=3, tier="High")
    state = cold.restore_state(KEY)
    assert (state.storage_class, state.access, state.restored_until) == (STANDARD, "readable", None)
    assert backend.get(KEY, bytes_max=100) == b"chunks"
    with pytest.raises(errors.InvalidInputError, match="ARCHIVE"):
        cold.set_class(KEY, "ARCHIVE")  # a class of GCS
    with pytest.raises(errors.ObjectNotFoundError):
        cold.set_class(pack_key("b" * 32), "Cool")
    backend.close()


def test_azure_writes_packs_in_a_tier(azure_bucket: AzureBucket) -> None:
    """All else is in the account's own."""
    backend = open_backend(azure_bucket.url, pack_class="Cold", **azure_bucket.options())
    with backend.open_writer(KEY) as writer:
        writer.write(b"chunks")
        writer.commit()
    backend.put("manifests/aa/x", b"bytes")
    backend.put_if_absent("commits/000000/x", b"bytes")
    tiers = azure_bucket.tiers()
    assert tiers.pop(KEY) == "Cold"
    assert set(tiers.values()) == {"Hot"}
    backend.close()


class _Blob:
    """The properties of a blob, and the requests that would change them."""

    def __init__(self, tier: str, status: str | None = None) -> None:
        from datetime import UTC, datetime

        self.blob_tier, self.archive_status = tier, status
        self.size, self.last_modified = 1, datetime(2026, 3, 1, tzinfo=UTC)
        self.sent: list[tuple[str, Mapping[str, str]]] = []

    def set(self, _what: str, _key: str, tier: str, options: Mapping[str, str]) -> None:
        if self.archive_status:
            msg = "HTTP 409 BlobBeingRehydrated"
            raise errors.ColdObjectError(msg)
        self.sent.append((tier, options))
        self.archive_status = "rehydrate-pending-to-hot" if self.blob_tier == "Archive" else None

    def cold(self) -> AzureColdStorage:
        return AzureColdStorage(lambda _key: self, self.set)


def test_azure_rehydrates_in_hours() -> None:
    """As Microsoft documents it; azurite does it at once. Nothing is asked for twice."""
    blob = _Blob("Archive")
    cold = blob.cold()
    assert cold.request_restore(KEY, days=7, tier="High")
    assert blob.sent == [("Hot", {"rehydrate_priority": "High"})]
    state = cold.restore_state(KEY)
    assert (state.storage_class, state.access) == ("Archive", "restoring")
    assert not cold.request_restore(KEY, days=7, tier="Standard")
    with pytest.raises(errors.ColdObjectError):
        cold.set_class(KEY, "Cool")
    blob.archive_status, blob.blob_tier = None, "Hot"
    assert cold.restore_state(KEY).access == "readable"
    assert len(blob.sent) == 1


def test_azure_asked_by_two_at_once() -> None:
    """The request that comes second is refused by the storage, and is no failure."""
    blob = _Blob("Archive")
    seen, blob.archive_status = AzureColdStorage(lambda _key: _Blob("Archive"), blob.set), "pending"
    assert not seen.request_restore(KEY, days=7, tier="Standard")


def test_an_account_without_tiers_is_told() -> None:
    """A premium account tells none; a move that has no effect is noticed."""
    blob = _Blob("")
    assert blob.cold().restore_state(KEY).storage_class == STANDARD
    with pytest.raises(errors.StorageError, match="afterwards"):
        blob.cold().set_class(KEY, "Cool")


@pytest.mark.slow
def test_a_version_on_azure_is_archived_and_thawed(azure_bucket: AzureBucket) -> None:
    """From the facade: only its packs are moved, a load says what to do, and a thaw is for good."""
    with ckptstore.open(azure_bucket.url, create=True, **azure_bucket.options()) as store:
        run = store.run("r")
        for step in (1, 2):
            run.save({"w": bytes([step]) * 100_000}, step=step)
        report = store.archive(runs=["r"], storage_class="Archive")
        assert (report.ok, report.moved.count) == (True, 1)
        assert sorted(azure_bucket.tiers().values()).count("Archive") == 1
        with pytest.raises(errors.ColdObjectError) as caught:
            store.load("r@1")
        assert "ckptstore thaw" in caught.value.hint
        assert store.verify().ok
        with pytest.raises(errors.InvalidInputError, match="'Bulk'"):
            store.thaw("r@1", tier="Bulk")
        thawed = store.thaw("r@1", wait=True, poll_s=0.01)
        assert (thawed.ready, thawed.for_good, thawed.restored_until) == (True, True, None)
        assert store.load("r@1") == {"w": b"\1" * 100_000}
        assert set(azure_bucket.tiers().values()) == {"Hot"}
        moved = store.archive(["r@1"], storage_class="Cool")
        assert moved.moved.count == 1
        back = store.archive(["r@1"], storage_class="Hot")
        assert (back.storage_class, back.moved.count) == (STANDARD, 1)


def test_wrappers_pass_classes_on() -> None:
    """A failure that passes is retried below a wrapper that knows nothing of classes."""
    shelf = Shelf()
    inner = ColdBackend(MemoryBackend(f"m-{uuid.uuid4().hex}"), shelf)
    inner.put(KEY, b"chunks")
    failed: list[str] = []

    def fail_once(key: str) -> None:
        if not failed:
            failed.append(key)
            msg = "busy"
            raise errors.TransientStorageError(msg)

    shelf.before_move = fail_once
    wrapped = _cold(MeteredBackend(RetryingBackend(inner, base_s=0.001)))
    assert wrapped.set_class(KEY, "GLACIER")
    assert failed
    assert wrapped.restore_state(KEY).access == "cold"
    assert RetryingBackend(MemoryBackend("plain")).cold_storage() is None
    assert MeteredBackend(MemoryBackend("plain")).cold_storage() is None


STEPS = (1, 2, 3)


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((30_000,), float(step))}, "m": {"v": torch.arange(9.0)}}


@pytest.fixture
def hot(tmp_path: Path) -> ckptstore.Store:
    """Return a store of three versions, whose packs are their own."""
    store = ckptstore.Store(create_on(MemoryBackend(f"repair-hot/{tmp_path}")))
    for step in STEPS:
        store.run("gpt").save(_state(step), step=step)
    return store


def _replica(hot: ckptstore.Store, name: str, shelf: Shelf) -> ckptstore.Store:
    store = ckptstore.Store(create_on(ColdBackend(MemoryBackend(name), shelf)))
    assert not hot.replicate(store).failures
    return store


def _packs(store: ckptstore.Store, ref: str) -> set[str]:
    table = store.repo.manifests.load(store.resolve(ref)).pieces
    return set(map(pack_key, table.packs))


def _lose(store: ckptstore.Store) -> None:
    """Delete all packs, past the log."""
    for info in list(store.repo.backend.list("packs/")):
        store.repo.backend.delete(info.key)


def _assert_loads(store: ckptstore.Store, step: int) -> None:
    assert torch.equal(store.load(f"gpt@{step}")["model"]["w"], _state(step)["model"]["w"])


def test_what_is_cold_there_is_left_and_the_rest_is_mended(
    hot: ckptstore.Store, tmp_path: Path
) -> None:
    """The report names the versions and the command; after the thaw the next repair mends them."""
    shelf = Shelf()
    cold = _replica(hot, f"repair-cold/{tmp_path}", shelf)
    frozen = _packs(cold, "gpt@2") - _packs(cold, "gpt@1")
    shelf.classes.update(dict.fromkeys(frozen, "GLACIER"))
    _lose(hot)
    report = hot.repair(cold)

    assert not report.ok
    assert [one.step for one in report.lost] == [2]
    (left,) = report.cold
    version = hot.resolve("gpt@2")
    assert (left.version, left.run, left.step) == (version.id, "gpt", 2)
    assert left.url == cold.url
    assert left.command == f"ckptstore thaw {version.id[:12]} --store {cold.url}"
    assert left.pieces_count >= 1
    for step in (1, 3):
        _assert_loads(hot, step)

    shelf.restored.update(frozen)
    again = hot.repair(cold)
    assert again.ok
    assert again.cold == ()
    for step in STEPS:
        _assert_loads(hot, step)
    assert hot.verify().ok


def test_what_one_has_only_cold_comes_from_the_next(hot: ckptstore.Store, tmp_path: Path) -> None:
    """All of the first is cold: nothing is lost, and nothing is said to be cold."""
    shelf = Shelf()
    first = _replica(hot, f"repair-first/{tmp_path}", shelf)
    second = _replica(hot, f"repair-second/{tmp_path}", Shelf())
    keys = [info.key for info in first.repo.backend.list("packs/")]
    shelf.classes.update(dict.fromkeys(keys, "DEEP_ARCHIVE"))
    _lose(hot)
    dry = hot.repair([first, second], dry_run=True)
    assert dry.ok
    report = hot.repair([first, second])
    assert report.ok
    assert report.cold == ()
    assert report.pieces["source"] > 0
    for step in STEPS:
        _assert_loads(hot, step)


def test_everything_cold(hot: ckptstore.Store, tmp_path: Path) -> None:
    """Each version is told once, of each store; nothing is asked for twice."""
    shelf = Shelf()
    cold = _replica(hot, f"repair-all/{tmp_path}", shelf)
    keys = [info.key for info in cold.repo.backend.list("packs/")]
    shelf.classes.update(dict.fromkeys(keys, "GLACIER"))
    _lose(hot)
    report = hot.repair(cold, dry_run=True)
    assert {one.step for one in report.lost} == set(STEPS)
    assert {one.step for one in report.cold} <= set(STEPS)
    assert sum(one.pieces_count for one in report.cold) == 4  # w of each step, v of all


def test_the_log_from_one_and_pieces_from_another(hot: ckptstore.Store, tmp_path: Path) -> None:
    """A copy of the log comes from whoever has it, whatever its place among the sources."""
    inner = hot.repo.backend
    while not isinstance(inner, MemoryBackend):
        inner = inner.inner  # type: ignore[attr-defined]
    copy = MemoryBackend(f"repair-copy/{tmp_path}")
    for info in list(inner.list("")):
        copy.put(info.key, inner.get(info.key, bytes_max=1 << 20))
    other = _replica(hot, f"repair-other/{tmp_path}", Shelf())
    twin = ckptstore.Store(open_on(copy))
    commits = sorted(info.key for info in inner.list("commits/"))
    inner.delete(commits[1])
    _lose(hot)
    again = ckptstore.Store(open_on(inner))
    report = again.repair([other, twin])
    assert report.ok
    assert [one.mended for one in report.commits] == [True]
    for step in STEPS:
        _assert_loads(again, step)
