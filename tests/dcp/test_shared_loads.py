"""Loads by all ranks of a group: each byte is fetched once, and all succeed or all fail."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch.distributed as dist
from damaging import flip_pack
from local_servers import Server, start_paced
from rankkit import sharing
from rankkit.groups import Group, run_ranks
from rankkit.sharing import nbytes_of, state_of

import ckptstore

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the place of a store with two versions of a run."""
    with ckptstore.open(tmp_path / "store", create=True, chunk_bytes=65536) as store:
        store.run("r").save(state_of(1), step=1)
        store.run("r").save(state_of(2), step=2)
    return str(tmp_path / "store")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Start an S3 server that counts what it sends."""
    found = start_paced(tmp_path)
    yield found
    found.stop()


def _sent(server: Server) -> int:
    with urlopen(f"{server.url}/-/counts") as answer:  # noqa: S310 - on loopback
        return int(json.load(answer)["sent"])


@pytest.mark.slow
def test_the_server_sends_each_byte_once(server: Server) -> None:
    """Four ranks load a state from S3: 1.1 times its bytes leave the server; alone, 4 times."""
    options: dict[str, Any] = {"endpoint_url": server.url, "key": "a", "secret": "b"}
    place = "s3://bucket/store"
    with ckptstore.open(place, create=True, chunk_bytes=65536, codec="raw", **options) as store:
        store.run("r").save(state_of(1), step=1)
    size, sent = nbytes_of(state_of(1)), [_sent(server)]
    for groups in ([[0, 1, 2, 3]], [], [[0, 1], [2, 3]]):
        assert run_ranks(sharing.from_server, 4, place, options, groups) == [1] * 4
        sent.append(_sent(server))
    together, alone, in_pairs = (b - a for a, b in itertools.pairwise(sent))

    assert alone >= 3 * size
    assert together <= 1.1 * alone / 4
    assert in_pairs <= 2.2 * alone / 4


@pytest.mark.short("delta|encrypted")
@pytest.mark.parametrize("form", ["planes", "raw", "delta", "int8", "derived", "encrypted"])
def test_every_form_is_shared(tmp_path: Path, form: str) -> None:
    """Compressed, delta, quantized, derived, encrypted: the state of a load alone, read once."""
    key: dict[str, Any] = {}
    if form == "encrypted":  # ranges cost whole segments: not too many ranges
        key = {"encryption_key": bytes(range(32)), "host_bytes": 1 << 26}
    place = str(tmp_path / "store")
    # One worker: the chunks lie in the same order in each run.
    with ckptstore.open(place, create=True, chunk_bytes=65536, workers=1, **key) as store:
        run = store.run("r")
        codec = form if form in {"planes", "raw", "delta"} else "planes"
        encodings = {"t*": "int8"} if form == "int8" else None
        for step in (1, 2):
            state = state_of(1)
            state["t7"] += step
            run.save(state, step=step, codec=codec, encodings=encodings)

    by_rank = run_ranks(sharing.load, 3, place, key, ["r@1", "r@2"])

    for turn in zip(*by_rank, strict=True):
        alone = turn[0][0]
        assert [problems for _, _, problems in turn] == [[]] * 3
        assert 0.5 * alone <= sum(together for _, together, _ in turn) <= 1.1 * alone
        assert max(together for _, together, _ in turn) <= 0.6 * alone


def test_all_ranks_load_the_version_that_the_first_one_finds(url: str) -> None:
    """Ranks that ask for different versions, as a moving ref may name, get that of rank 0."""
    assert run_ranks(sharing.different_refs, 2, url) == [1, 1]


_CASES = [
    ("storage", 1, 1, "StorageError", "rank 1: injected failure"),
    ("storage", 0, 5, "StorageError", "rank 0: injected failure"),
    ("log", 0, 1, "StorageError", "rank 0: injected failure"),
    ("log", 2, 1, "StorageError", "rank 2: injected failure"),
    ("missing", 0, 1, "VersionNotFoundError", "rank 0: "),
    ("target", 2, 1, "InvalidInputError", "rank 2: "),
    ("selection", 1, 1, "InvalidInputError", "rank 1 and rank 0 of the group load different"),
    ("callback", 1, 1, "RankFailedError", "rank 1: ValueError: the bar is broken"),
    ("plan", 1, 1, "RankFailedError", "rank 1: MemoryError"),
    ("odd", 1, 1, "StorageError", "rank 1: odd 5: ???"),
    ("mute", 1, 1, "RankFailedError", "rank 1: MuteError"),
    ("dcp", 1, 1, "InvalidInputError", "of the group do different things"),
    ("ctrl-c", 2, 4, "RankFailedError", "rank 2 was interrupted"),
    ("flipped", 1, 3, "CorruptTensorError", "a piece that rank 1 sent arrived damaged"),
]


_OWN = {
    "ctrl-c": "KeyboardInterrupt", "callback": "ValueError", "plan": "MemoryError",
    "odd": "OddError", "mute": "MuteError",
}  # fmt: skip
"""Errors that the rank raises itself, where it is not that of the others."""


def test_a_rank_that_fails_fails_all_and_the_group_stays_usable(url: str) -> None:
    """Storage, log, version, target, selection, Ctrl-C, a flipped bit on the way: all ranks raise.

    The error names the rank, and the next load in the same group succeeds.
    """
    by_rank = run_ranks(sharing.fail_in_turn, 3, url, [case[:3] for case in _CASES])

    for ends, (case, victim, _, kind, text) in zip(zip(*by_rank, strict=True), _CASES, strict=True):
        for rank, (raised, said, again) in enumerate(ends):
            assert again, (case, rank)
            if rank == victim and case in _OWN:
                assert raised == _OWN[case]
                continue
            assert raised == kind, (case, rank, said)
            assert text in said, (case, rank)


def test_damage_in_the_store_is_named_by_all(url: str) -> None:
    """A flipped byte of a pack: every rank raises CorruptTensorError with rank and tensor."""
    for pack in sorted(Path(url, "packs").rglob("*.pack")):
        flip_pack(pack, only=0)

    ends = [run[0] for run in run_ranks(sharing.fail_in_turn, 3, url, [("damaged", 9, 1)] * 1)]

    assert {end[0] for end in ends} == {"CorruptTensorError"}
    assert len({end[1] for end in ends}) == 1
    assert ends[0][1].startswith("rank ")


@pytest.mark.parametrize(("victim", "at"), [(2, 1), (0, 5)])
def test_a_killed_rank_is_named_by_the_others(url: str, victim: int, at: int) -> None:
    """SIGKILL between two reads: the others raise RankFailedError with its rank, at once."""
    with Group(sharing.fail, 4, url, "killed", victim, at) as group:
        others = [rank for rank in range(4) if rank != victim]
        while not all(group.told[rank] for rank in others):
            assert group.step(60), group.told
        for rank in others:
            kind, said = group.told[rank][0]
            assert kind == "RankFailedError"
            assert f"rank {victim} is gone" in said


@pytest.mark.short(sample=2)
@pytest.mark.parametrize(
    "way", ["replicas", "rows", "columns", "hybrid", "replicas meta", "rows uneven"]
)
def test_a_load_of_dcp_reads_each_byte_once(tmp_path: Path, way: str) -> None:
    """``dcp.load`` of a version that one process saved: all ranks together read it once."""
    place = str(tmp_path / "store")
    with ckptstore.open(place, create=True, chunk_bytes=65536, codec="raw") as store:
        state = state_of(1, scale=8)
        del state["half"]  # it follows from another tensor, and reads that
        store.run("r").save(state, step=1)

    by_rank = run_ranks(sharing.dcp_counting, 4, place, "r@1", way)

    assert [problems for _, _, problems in by_rank] == [[]] * 4
    assert sum(read for read, _, _ in by_rank) <= 1.1 * nbytes_of(state)


def test_a_rank_of_eight_reads_its_eighth(tmp_path: Path) -> None:
    """Rows of a version that eight ranks saved: each reads at most 1.1 times what it needs."""
    place = str(tmp_path / "store")
    ckptstore.open(place, create=True, codec="raw").close()
    run_ranks(sharing.dcp_saved, 8, place)

    by_rank = run_ranks(sharing.dcp_counting, 8, place, "d@1", "rows alone")

    for read, needed, problems in by_rank:
        assert problems == []
        assert read <= 1.1 * needed


def test_a_failing_rank_fails_a_load_of_dcp(url: str) -> None:
    """Every rank raises torch's CheckpointException with the rank that failed."""
    for kind, said in run_ranks(sharing.dcp_fail, 3, url, 1):
        assert kind == "CheckpointException"
        assert "rank 1: injected failure" in said


def test_a_single_process_and_no_group() -> None:
    """What is no group is refused by name, before anything is read."""
    with ckptstore.open("memory://shared-load", create=True) as store:
        store.run("r").save({"w": [1.0]}, step=1)
        wrong: Any = "world"
        with pytest.raises(ckptstore.errors.InvalidInputError, match="process group"):
            store.load("r@1", group=wrong)
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        with pytest.raises(ckptstore.errors.InvalidInputError, match="this rank is not in"):
            store.load("r@1", group=outside)
