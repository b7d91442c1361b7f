"""Reference records: they spare collections the reading of manifests, and can lose nothing."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
from faultkit.stores import contents
from gckit import Place, delete, equal, new_place, parts_of, undelete
from hypothesis import given, settings
from hypothesis import strategies as st
from metered import MeteredBackend
from shortening import examples

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, LimitError, StorageError, UnsupportedFeatureError
from ckptstore.format.framing import encode_frame
from ckptstore.format.keys import (
    MANIFESTS_PREFIX,
    REFERENCES_PREFIX,
    is_references_key,
    pack_id,
    references_key,
)
from ckptstore.format.references import MAGIC, References, decode_references, encode_references
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When

DAY = 86_400.0


class _Reads(MeteredBackend):
    """Counts reads by the first part of the key."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.backend)
        self.reads: Counter[str] = Counter()

    def get(self, key: str, *, bytes_max: int) -> bytes:
        self.reads[key.partition("/")[0]] += 1
        return super().get(key, bytes_max=bytes_max)


def _saved(place: Place, *steps: int) -> None:
    """Save versions that share one chunk and have one of their own."""
    with place.open() as store:
        for step in steps:
            store.run("gpt").save(parts_of(0, step), step=step)


def _all_load(store: Store) -> None:
    for version in store.versions():
        if version.level == "record":
            continue
        assert equal(store.load(f"#{version.id}"), parts_of(0, version.step))


def _collected(place: Place, **options: float | None) -> Counter[str]:
    """Collect in a process of its own; return the reads by kind."""
    backend = _Reads(place)
    with place.open(backend) as store:
        store.gc(**options)  # type: ignore[arg-type]  # the numbers are graces and ages
        reads = Counter(backend.reads)
        _all_load(store)
    assert place.needed() <= place.stored()
    return reads


def _record_key(place: Place) -> str:
    (key,) = (key for key in place.backend.objects if key.startswith(REFERENCES_PREFIX))
    return key


def _record(place: Place) -> References:
    key = _record_key(place)
    return decode_references(place.backend.objects[key].data, where=key)


def _forge(place: Place, record: References | bytes) -> None:
    """Put another record in the place of the one that is there."""
    data = record if isinstance(record, bytes) else encode_references(record)
    for key in [key for key in place.backend.objects if key.startswith(REFERENCES_PREFIX)]:
        place.backend.delete(key)
    place.backend.put(references_key(limits.COMMIT_NUMBER_MAX, "0" * 8), data)


def _thrown_away(place: Place) -> None:
    """Collect without a record, twice: exactly what versions need is left."""
    for key in [key for key in place.backend.objects if key.startswith(REFERENCES_PREFIX)]:
        place.backend.delete(key)
    for _ in range(2):
        _collected(place, grace_s=0, orphan_age_s=0)
    assert place.stored() == place.needed()


def test_nothing_to_do_reads_no_manifest_but_new_ones(place: Place) -> None:
    """The first collection reads all, the next none, then only those that came since."""
    _saved(place, *range(6))
    assert _collected(place)["manifests"] == 6
    first = _record_key(place)
    reads = _collected(place)
    assert (reads["manifests"], reads["references"]) == (0, 1)
    assert _record_key(place) == first, "nothing new to say"
    _saved(place, 6, 7)
    assert _collected(place)["manifests"] == 2
    assert _record_key(place) != first
    assert _collected(place)["manifests"] == 0
    assert len(_record(place).manifests) == 8


def test_a_collection_that_only_deletes_reads_no_manifest(place: Place) -> None:
    """What the log condemned is deleted after its grace, as ever; the report is the same."""
    _saved(place, *range(4))
    with place.open() as store:
        delete(store, *(version.id for version in store.versions()[:2]))
        condemned = store.gc(repack_below=None).condemned
        assert condemned["manifests"].count == 2
        assert condemned["packs"].count == 1
        assert not store.gc(repack_below=None).swept["packs"].count
    place.environment.sleep(DAY)
    with place.open() as planning:
        told = planning.gc(dry_run=True, repack_below=None)
    backend = _Reads(place)
    with place.open(backend) as store:
        done = store.gc(repack_below=None)
        assert backend.reads["manifests"] == 0
        assert done.swept == condemned == told.swept
        assert (done.live, done.live_chunk_bytes) == (told.live, told.live_chunk_bytes)
    assert place.stored() == place.needed()


@pytest.mark.parametrize("below", [None, 0.5, 1.0])
def test_figures_are_those_of_the_manifests(place: Place, below: float | None) -> None:
    """With and without a record a collection reports the same."""
    _saved(place, *range(4))
    place.orphan()
    with place.open() as store:
        store.fork("gpt@0", "part", include=["model.a"])
        store.gc(repack_below=below)
        known = store.gc(dry_run=True, repack_below=below)
        place.backend.delete(_record_key(place))
        read = store.gc(dry_run=True, repack_below=below)
    assert replace(known, seconds=0) == replace(read, seconds=0)
    assert known.young["packs"].count == 1


def test_a_version_that_goes_or_comes_back_is_noticed(place: Place) -> None:
    """A record of manifests that are not all live does not count; after an undelete it does."""
    _saved(place, *range(4))
    _collected(place)
    with place.open() as store:
        first = store.versions()[0]
        delete(store, first.id)
        undelete(store, first.id)
    assert _collected(place, grace_s=0, orphan_age_s=0)["manifests"] == 0, "as before"
    with place.open() as store:
        store.age(["gpt@1"], "record", force=True)
    assert _collected(place, grace_s=0, orphan_age_s=0)["manifests"] == 3 + 1, "and the dead one"
    _thrown_away(place)


def test_a_version_deleted_beside_a_collection_waits_for_the_next(place: Place) -> None:
    """A collection that found nothing to do by a record condemns nothing, whatever comes then."""
    _saved(place, *range(3))
    _collected(place)
    with place.open() as other:

        class _Meanwhile(MeteredBackend):
            def get(self, key: str, *, bytes_max: int) -> bytes:
                """Pass on; after the record was read, a version is deleted."""
                data = super().get(key, bytes_max=bytes_max)
                if is_references_key(key):
                    delete(other, other.versions()[0].id)
                return data

        with place.open(_Meanwhile(place.backend)) as store:
            report = store.gc(grace_s=0, orphan_age_s=0)
    for kind in ("packs", "manifests"):
        assert not report.condemned[kind].count
        assert not report.swept[kind].count
    assert _collected(place, grace_s=0, orphan_age_s=0)["manifests"] > 0
    assert place.stored() == place.needed()


def test_a_lost_manifest_is_noticed_without_reading(place: Place) -> None:
    """The listing shows that it is gone or has another size: the version is named, as ever."""
    _saved(place, *range(3))
    _collected(place)
    with place.open() as store:
        victim = store.versions()[1]
    whole = place.backend.objects[victim.manifest_key].data
    for data in (None, whole[:-1]):
        place.backend.delete(victim.manifest_key)
        if data is not None:
            place.backend.put(victim.manifest_key, data)
        with (
            place.open() as store,
            pytest.raises((CorruptObjectError, StorageError), match="gpt@1"),
        ):
            store.gc()


# --- records that lie --------------------------------------------------------------------------
def test_a_record_that_omits_a_live_pack_loses_nothing(place: Place) -> None:
    """All manifests are read before anything is condemned, and the record is made again."""
    _saved(place, *range(4))
    _collected(place)
    true = _record(place)
    for missing in true.packs:
        packs = {pack: size for pack, size in true.packs.items() if pack != missing}
        _forge(place, replace(true, packs=packs))
        place.environment.sleep(2 * DAY)
        assert _collected(place)["manifests"] == 4
        assert _record(place) == true
    _forge(place, replace(true, packs={}))
    _collected(place, grace_s=0, orphan_age_s=0)
    assert _record(place) == true


def test_a_record_that_names_too_much_keeps_it_until_something_is_condemned(place: Place) -> None:
    """Garbage stays, which loses nothing; the next collection with work finds it."""
    _saved(place, *range(3))
    _collected(place)
    orphan = place.orphan()
    true, pack = _record(place), pack_id(orphan)
    assert pack is not None
    _forge(place, replace(true, packs={**true.packs, pack: 1 << 40}))
    _collected(place, grace_s=0, orphan_age_s=0)
    assert orphan in place.stored()
    with place.open() as store:
        delete(store, store.versions()[0].id)
    _collected(place, grace_s=0, orphan_age_s=0)
    assert orphan not in place.stored()
    assert place.stored() == place.needed()


def test_a_record_of_manifests_that_nobody_has_does_not_count(place: Place) -> None:
    """One of another store, or of an older state of this one, is passed over."""
    _saved(place, *range(3))
    _collected(place)
    stale = _record(place)
    with place.open() as store:
        delete(store, store.versions()[0].id)
    whole = {"grace_s": 0.0, "orphan_age_s": 0.0, "repack_below": None}
    _collected(place, **whole)
    for record in (stale, replace(stale, manifests=frozenset({b"x" * 32}))):
        _forge(place, record)
        assert _collected(place, **whole)["manifests"] == 2
        assert _record(place).manifests < stale.manifests
    assert place.stored() == place.needed()


def test_any_flipped_bit_is_noticed(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Damage anywhere in a record costs the reading of manifests, with a warning, and no more."""
    _saved(place, 0, 1)
    _collected(place)
    key = _record_key(place)
    data = place.backend.objects[key].data
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises((CorruptObjectError, UnsupportedFeatureError), match=key):
            decode_references(bytes(flipped), where=key)
    for wrong in (bytes(flipped), data[:-1], data + b"x", b"", b"CKPTREFS", data[:64]):
        _forge(place, wrong)
        with caplog.at_level(logging.WARNING, "ckptstore"):
            caplog.clear()
            assert _collected(place, grace_s=0, orphan_age_s=0)["manifests"] == 2
        assert "manifests are read instead" in caplog.text
        assert _record(place).manifests


@pytest.mark.parametrize(
    "body",
    [
        [b"x" * 31, b"", [], True], [b"x" * 64, b"", [], True], [b"x" * 32, b"y" * 15, [1], True],
        [b"x" * 32, b"y" * 32, [1, 2], True], [b"x" * 32, b"y" * 16, [], True],
        [b"x" * 32, b"y" * 16, [1, 2], True], [b"x" * 32, b"y" * 16, [-1], True],
        [b"x" * 32, b"y" * 16, ["1"], True], [b"x" * 32, b"y" * 16, [1], 1],
        [b"x" * 32, b"y" * 16, [1]], {"manifests": b""}, [[[[]]]],
    ],
)  # fmt: skip
def test_records_that_contradict_themselves_are_refused(body: object) -> None:
    """Lengths, types and doubled entries, whatever the digest says."""
    with pytest.raises(CorruptObjectError, match="somewhere"):
        decode_references(encode_frame(MAGIC, msgspec.msgpack.encode(body)), where="somewhere")


def test_records_beyond_the_limits_are_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bomb is not unpacked, a long object not fetched; what would be too long is not written."""
    _saved(place, 0, 1)
    _collected(place)
    true = _record(place)
    bomb = encode_frame(MAGIC, bytes(limits.RECORD_RATIO_FREE_BYTES + 1))
    monkeypatch.setattr(limits, "REFERENCES_BYTES_MAX", limits.RECORD_RATIO_FREE_BYTES)
    for wrong in (bomb, bytes(limits.RECORD_RATIO_FREE_BYTES + 1)):
        _forge(place, wrong)
        assert _collected(place)["manifests"] == 2
        assert _record(place) == true
    monkeypatch.setattr(limits, "SNAPSHOT_VERSIONS_MAX", 1)
    with pytest.raises(LimitError):
        encode_references(true)
    _forge(place, b"")
    with caplog.at_level(logging.DEBUG, "ckptstore"):
        assert _collected(place)["manifests"] == 2
    assert "could not write a reference record" in caplog.text


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_no_record_whatsoever_loses_anything(data: st.DataObject) -> None:
    """Any sound record beside any history of saves, forks and deletions, with no grace or age."""
    place = new_place()
    _saved(place, *range(4))
    _collected(place, grace_s=0, orphan_age_s=0)
    true = _record(place)
    with place.open() as store:
        ids = [version.id for version in store.versions()]
        gone = data.draw(st.sets(st.sampled_from(ids[:3]), max_size=3))
        if gone:
            delete(store, *gone)
        if data.draw(st.booleans()):
            store.run("gpt").save(parts_of(0, 9), step=9)
        live = [version.manifest_digest for version in store.versions()]
    orphan = pack_id(place.orphan("7"))
    assert orphan is not None
    packs = data.draw(st.sets(st.sampled_from([*true.packs, orphan])))
    size = st.integers(0, 1 << 40)
    _forge(
        place,
        References(
            manifests=frozenset(
                map(bytes.fromhex, data.draw(st.sets(st.sampled_from([*live, "00" * 32]))))
            ),
            packs={pack: data.draw(size) for pack in packs},
            deltas_settled=data.draw(st.booleans()),
        ),
    )
    below = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    for _ in range(2):
        _collected(place, grace_s=0, orphan_age_s=0, repack_below=below)
    _thrown_away(place)


@pytest.mark.short(sample=1)
@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_any_call_may_fail(when: When, times: int) -> None:
    """Of a collection that deletes and replaces a record: versions load, the next finishes it."""
    at = 1
    while True:
        place = new_place()
        _saved(place, 0, 1, 2)
        with place.open() as store:
            delete(store, store.versions()[0].id)
            store.gc(orphan_age_s=0)
        _saved(place, 3)
        fault = Fault(at=at, times=times, when=when)
        faulty = FaultyBackend(place.backend, fault)
        with suppress(StorageError), place.open(faulty) as collector:
            collector.gc(grace_s=0)
        assert place.needed() <= place.stored()
        _collected(place, grace_s=0)
        assert place.stored() == place.needed()
        records = [key for key in contents(place.backend) if key.startswith(REFERENCES_PREFIX)]
        assert len(records) <= 2, "a second where the deletion of the first failed"
        if not fault.hits:
            break
        at += 1
    assert at > 12


def test_other_names_in_the_folder_stay(place: Place) -> None:
    """What is no record by its name is neither read nor deleted."""
    _saved(place, 0)
    other = f"{REFERENCES_PREFIX}notes.txt"
    place.backend.put(other, b"mine")
    _collected(place)
    _saved(place, 1)
    _collected(place)
    assert other in place.backend.objects
    assert sum(key.startswith(MANIFESTS_PREFIX) for key in place.backend.objects) == 2
