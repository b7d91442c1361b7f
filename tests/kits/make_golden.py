"""Makes the golden stores of format v1; run it only when a new format version needs a new one.

    python tests/kits/make_golden.py tests/compat/golden/v1
    python tests/kits/make_golden.py tests/compat/golden/v1-blocks
    python tests/kits/make_golden.py tests/compat/golden/v1-recipes
    python tests/kits/make_golden.py tests/compat/golden/v1-delta
    python tests/kits/make_golden.py tests/compat/golden/v1-aged
    python tests/kits/make_golden.py tests/compat/golden/v1-replica
    python tests/kits/make_golden.py tests/compat/golden/v1-again
    python tests/kits/make_golden.py tests/compat/golden/v1-encrypted
    python tests/kits/make_golden.py tests/compat/golden/v1-tiers
    python tests/kits/make_golden.py tests/compat/golden/v1-arranged

The later ones hold later additions to the format: tensors in blocks, tensors derived from
others, pieces that are differences to those of older versions, versions whose weights were rounded,
versions that came from another store, or came back, encrypted objects, names of replicas, and
differences that were rearranged.
The golden stores are committed. Later versions of ckptstore must read them unchanged, so an
existing store is never made again; ``test_golden_v1.py`` and the other tests hold every value, as
literals.
Ids, times and names come from a simulated environment: the same program gives the same store, but
for zstd's compression of the chunks.
"""

from __future__ import annotations

import datetime as dt
import pathlib
import sys
import tempfile
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from arranged_state import arranged_state
from simulated_environment import SimulatedEnvironment

from ckptstore import keyring, limits, repo
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.registry import open_backend
from ckptstore.backends.sealing import UserKey
from ckptstore.catalog.replica_ops import name_replica, unname_replica
from ckptstore.checkpoint.assemble import commit_parts
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.config import Options
from ckptstore.repo import Finding, Repo, create_on
from ckptstore.states.shards import Shard, write_part
from ckptstore.store import Store
from ckptstore.tensors.adapters import TypeAdapter


class Money:
    """A type of a user's own, stored through an adapter."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


MONEY = TypeAdapter(
    name="money",
    type=Money,
    to_state=lambda money: {"cents": money.cents},
    from_state=lambda state: Money(state["cents"]),
)


def tensors() -> dict[str, Any]:
    """Return tensors of every kind, and of every layout of planes."""
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tied = torch.tensor([1.5, -2.5, 3.25])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop quantized tensors
        quantized = torch.quantize_per_tensor(torch.tensor([0.0, 1.0, 2.0]), 0.5, 10, torch.quint8)
    wave = torch.arange(40_000) % 251
    return {
        "float32": base,
        "view": base[1:, ::2],
        "tied": tied,
        "tied_again": tied,
        "parameter": torch.nn.Parameter(torch.tensor([[1.0, 2.0]])),
        "frozen": torch.nn.Parameter(torch.tensor([3.0]), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.tensor([7.0])),
        "channels_last": torch.arange(24.0)
        .reshape(1, 2, 3, 4)
        .contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "bool": torch.tensor([True, False, True]),
        "bfloat16": torch.tensor([1.0, -0.5, 3.0], dtype=torch.bfloat16),
        "float16": torch.arange(100, dtype=torch.float16) / 8,
        "float8": torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "complex64": torch.tensor([1 + 2j, -3.5j]),
        "quantized": quantized,
        "generator": torch.Generator().manual_seed(7),
        "large_float32": wave.to(torch.float32) / 8,
        "large_equal": wave.to(torch.float32) / 8,
        "planes_float64": torch.arange(500, dtype=torch.float64) / 4,
        "planes_bfloat16": (torch.arange(600) % 17).to(torch.bfloat16),
        "planes_int16": torch.arange(700, dtype=torch.int16),
        "planes_int32": torch.arange(800, dtype=torch.int32) * 3,
        "planes_int64": torch.arange(900, dtype=torch.int64) - 450,
        "zstd_uint8": torch.arange(2000).remainder(5).to(torch.uint8),
    }


def others() -> dict[str, Any]:
    """Return NumPy values and plain values of every kind."""
    attributed: OrderedDict[str, int] = OrderedDict(b=1, a=2)
    attributed._metadata = {"version": 2}  # type: ignore[attr-defined]
    return {
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "numpy_struct": np.array([(1, 2.5), (3, 4.5)], dtype=[("id", "<i4"), ("x", "<f8")]),
        "numpy_text": np.array(["ab", "ü"]),
        "numpy_scalar": np.float32(0.5),
        "numpy_dtype": np.dtype("<u2"),
        "long_bytes": b"0123456789" * 500,
        "long_text": "grün " * 1000,
        "long_bytearray": bytearray(b"xyz" * 2000),
        "plain": [None, True, False, 0, -5, 2**63, -(10**30), 1.5, float("-inf"), "ä", b"\x00\xff"],
        "surrogate": "a\udc80b",
        "complex": 1.5 - 2j,
        "tuple": (1, (2,), ()),
        "set": {1, "a"},
        "frozenset": frozenset({(1, 2)}),
        "deque": deque([1, 2], maxlen=5),
        "ordered": attributed,
        "defaultdict": defaultdict(list, {"k": [1]}),
        "counter": Counter("aab"),
        "keys": {
            1: "int",
            "1": "str",
            None: "none",
            (1, "x"): "tuple",
            2.5: "float",
            b"b": "bytes",
        },
        "bytearray": bytearray(b"abc"),
        "range": range(1, 10, 3),
        "slice": slice(None, 5),
        "path": pathlib.PurePosixPath("/data/x"),
        "date": dt.date(2024, 2, 29),
        "datetime": dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC),
        "timedelta": dt.timedelta(days=-1, seconds=5),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "money": Money(250),
    }


def create(
    folder: pathlib.Path, environment: SimulatedEnvironment, key: UserKey | None = None
) -> Repo:
    """Create a store in a folder that does not exist yet."""
    for module in (repo, keyring):
        module.writer_identity = lambda: "golden@example 1"  # type: ignore[attr-defined]
    limits.SNAPSHOT_COMMITS_MIN = 4  # type: ignore[misc]
    torch.set_num_threads(1)
    finding = Finding(put_if_absent=PutIfAbsent.ATOMIC, report={"made by": "make_golden.py"})
    return create_on(
        open_backend(folder, kind="local"),
        prober=lambda _backend, _environment: finding,
        chunk_bytes=limits.CHUNK_BYTES_MIN,
        key=key,
        environment=environment,
        options=Options(workers=1),
    )


def make_blocks(folder: pathlib.Path) -> None:
    """Make the golden store of tensors in blocks, as two ranks would write it."""
    rows = torch.arange(20_000, dtype=torch.float32).reshape(100, 200) / 8
    tiles = torch.arange(63, dtype=torch.int64).reshape(7, 9)
    deep = (torch.arange(4 * 3 * 5) % 13).to(torch.bfloat16).reshape(4, 3, 5)

    def shard(name: str, whole: torch.Tensor, *part: slice) -> Shard:
        offsets = tuple(p.start or 0 for p in part)
        return Shard(name=name, shape=tuple(whole.shape), offsets=offsets, tensor=whole[part])

    every = slice(None)
    first = [
        shard("model.rows", rows, slice(0, 51), every),
        shard("model.columns", rows, every, slice(0, 150)),
        shard("model.tiles", tiles, slice(0, 4), slice(0, 5)),
        shard("model.tiles", tiles, slice(4, 7), slice(5, 9)),
        shard("model.deep", deep, every, slice(1, 3), every),
    ]
    second = [
        shard("model.rows", rows, slice(51, 100), every),
        shard("model.columns", rows, every, slice(150, 200)),
        shard("model.tiles", tiles, slice(0, 4), slice(5, 9)),
        shard("model.tiles", tiles, slice(4, 7), slice(0, 5)),
        shard("model.deep", deep, every, slice(0, 1), every),
    ]
    names = [f"model.{name}" for name in ("rows", "columns", "tiles", "deep")]
    paths: dict[str, Any] = {name: tuple(name.split(".")) for name in names}
    with create(folder, SimulatedEnvironment(2)) as opened:
        parts = [
            write_part(opened, first, {"step": 3, "pair": (1, torch.tensor([1.5, -2.0]))}),
            write_part(opened, second, {}),
        ]
        commit_parts(
            opened,
            parts,
            {**paths, "step": ("step",), "pair": ("pair",)},
            WriteRequest(run="ranks", step=3, metrics={"loss": 0.25}),
            roles={},
        )


def make_recipes(folder: pathlib.Path) -> None:
    """Make the golden store of tensors derived from others, in every form."""
    master = (((torch.arange(20_000) * 7919) % 2003 - 1001) / 256).reshape(100, 200)
    wave = master.flatten()[:5000]
    spread = wave * 2.0 ** -((torch.arange(5000) % 23).to(torch.float32))
    turned = wave[:4800].reshape(2, 30, 8, 10).contiguous(memory_format=torch.channels_last)
    state: dict[str, Any] = {
        "model": {"weight": master.to(torch.bfloat16), "half": master.to(torch.float16)},
        "master": master,
        "bf16": spread / 3,
        "fp16": wave.to(torch.float64) / 3,
        "fp8_e4m3fn": wave / 2,
        "fp8_e5m2": torch.cat([wave / 2, torch.tensor([float("nan"), float("-inf"), -0.0])]),
        "int8": spread / 5,
        "int8_bf16": (wave / 6).to(torch.bfloat16),
        "dynamic_signed": spread / 7,
        "dynamic_unsigned": (spread / 9).square(),
        "turned": turned / 3,
        "scalar": torch.tensor(0.3),
    }
    encodings = {
        "bf16": "bf16",
        "fp16": "fp16",
        "fp8_e4m3fn": "fp8_e4m3fn",
        "fp8_e5m2": "fp8_e5m2",
        "int8*": "int8:block=64",
        "dynamic_*": "dynamic8",
        "turned": "int8:block=16",
        "scalar": "int8",
    }
    with Store(create(folder, SimulatedEnvironment(3))) as store:
        store.run("coded").save(state, step=1, encodings=encodings)
        state["master"][0, 0] = 5.0
        state["model"]["weight"][0, 0] = 5.0
        state["int8"][7] = 100.0
        store.run("coded").save(state, step=2, encodings=encodings)


def make_aged(folder: pathlib.Path) -> None:
    """Make the golden store of versions that are kept only in part, at every level."""
    master = (((torch.arange(5_000) * 7919) % 2003 - 1001) / 300).reshape(100, 50)
    least = limits.SNAPSHOT_COMMITS_MIN
    limits.SNAPSHOT_COMMITS_MIN = 3  # type: ignore[misc]  # so that there is a snapshot, too
    try:
        with Store(create(folder, SimulatedEnvironment(5))) as store:
            run = store.run("old")
            for step in range(6):
                weight = master + step
                state = {
                    "model": {"low": weight.to(torch.bfloat16), "own": weight / 3},
                    "optimizer": {"master": weight, "m": torch.full((10,), float(step))},
                    "epoch": step,
                }
                run.save(state, step=step, codec="planes")
            store.age(["old@0"], "record")
            store.age(["old@1"], "weights-bf16")
            store.age(["old@1", "old@2"], "weights-int8", lossy="int8:block=64")
            store.age(["old@3"], "weights-bf16", lossy="bf16:rel_l2=0.004")
            store.age(["old@4"], "weights")
            run.set_policy({"full": "last 1", "weights-int8": "all", "lossy": "int8:rel_l2=0.02"})
    finally:
        limits.SNAPSHOT_COMMITS_MIN = least  # type: ignore[misc]


def moved(bits: np.ndarray[Any, Any], step: int) -> np.ndarray[Any, Any]:
    """Return words of any width, each a few away from its value at step 0."""
    away = np.arange(bits.size) * 7 % 23 * step
    made: np.ndarray[Any, Any] = bits + away.astype(bits.dtype)
    return made


def delta_state(step: int) -> dict[str, Any]:
    """Return tensors of every layout whose bits move, over odd ones: NaNs, zeros, infinities."""
    places = np.arange(35_000, dtype=np.uint64)
    noise = places * places * np.uint64(7919) % np.uint64(65_521)
    values = (noise.astype(np.float64) - 32_760) / 4096
    odd = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45]
    state: dict[str, Any] = {}
    for kind in (np.float32, np.float16, np.float64):
        floats = values[: 70_000 // np.dtype(kind).itemsize].astype(kind)
        floats[: len(odd)] = odd
        word = f"u{floats.itemsize}"
        state[np.dtype(kind).name] = torch.from_numpy(moved(floats.view(word), step).view(kind))
    for whole in (np.int16, np.int32, np.int64):
        count = 70_000 // np.dtype(whole).itemsize
        words = (np.resize(noise, count).astype(np.int64) * 257 - 300).astype(whole)  # it wraps
        state[np.dtype(whole).name] = torch.from_numpy(moved(words, step))
    state["uint8"] = torch.from_numpy(moved(np.resize(noise, 70_000).astype(np.uint8), step))
    return state


def make_arranged(folder: pathlib.Path) -> None:
    """Make the golden store of deltas in all forms: a keyframe, and a version of deltas."""
    with Store(create(folder, SimulatedEnvironment(10))) as store:
        for step in range(2):
            store.run("moving").save(arranged_state(step), step=step, codec="delta")


def make_delta(folder: pathlib.Path) -> None:
    """Make the golden store of deltas: a keyframe, two versions of deltas, and one of both."""
    with Store(create(folder, SimulatedEnvironment(4))) as store:
        run = store.run("moving")
        for step in range(3):
            run.save(delta_state(step), step=step, codec="delta")
        state = delta_state(2)
        state["int16"] = torch.flip(state["int16"], (0,))
        run.save(state, step=3, codec="delta")
        store.remove(["moving@0"])


def make_replica(folder: pathlib.Path) -> None:
    """Make the golden store that has versions of another, some of them as records, and its own.

    The other store is made beside it, in a folder outside of it, and removed.
    """
    least = limits.SNAPSHOT_COMMITS_MIN
    limits.SNAPSHOT_COMMITS_MIN = 4  # type: ignore[misc]  # so that snapshots hold versions
    try:
        with (
            tempfile.TemporaryDirectory() as place,
            Store(create(pathlib.Path(place) / "first", SimulatedEnvironment(6))) as first,
            Store(create(folder, SimulatedEnvironment(7))) as store,
        ):
            run = first.run("gpt", metrics={"loss": "min"})
            state = {"model": {"w": torch.arange(5000.0)}, "optimizer": {"m": torch.ones(300)}}
            for step in range(4):
                state["model"]["w"][step] = -1.5
                loss = float("nan") if step == 1 else 1 / (1 + step)
                tags = ["good"] if step == 2 else ()
                metadata = {"note": "größer"}
                run.save(
                    state,
                    step=step,
                    metrics={"loss": loss},
                    tags=tags,
                    metadata=metadata,
                    codec="planes",
                )
            run.rollback("2")
            first.fork("gpt@2", "ft")
            first.run("ft").save(state, step=9, codec="planes")
            first.age(["gpt@0"], "weights")
            first.replicate(store, ["ft@9"])
            first.replicate(store, ["gpt@0", "gpt@3"])
            store.run("ft").save(state, step=10, codec="planes")
            store.replicate(first)
            first.replicate(store, ["gpt@2"])
            store.age(["gpt@3"], "record")
    finally:
        limits.SNAPSHOT_COMMITS_MIN = least  # type: ignore[misc]


def make_again(folder: pathlib.Path) -> None:
    """Make the golden store of a replica that changed versions itself, and took some of it back.

    A deleted and collected version that came again, a rollback that follows the source, and one
    that does not.
    """
    least = limits.SNAPSHOT_COMMITS_MIN
    limits.SNAPSHOT_COMMITS_MIN = 4  # type: ignore[misc]  # so that snapshots hold who decided
    try:
        with (
            tempfile.TemporaryDirectory() as place,
            Store(create(pathlib.Path(place) / "first", SimulatedEnvironment(10))) as first,
            Store(create(folder, SimulatedEnvironment(11))) as store,
        ):
            for name in ("gpt", "vit"):
                for step in range(4):
                    state = {"model": {"w": torch.arange(700.0) + step}}
                    first.run(name).save(state, step=step, tags=[f"t{step}"], codec="planes")
            first.replicate(store)
            store.remove(["gpt@1"], force=True)
            store.gc(grace_s=0.0, orphan_age_s=0.0)
            first.replicate(store, ["gpt@1"])
            store.rollback("gpt@2")
            first.rollback("vit@1")
            first.replicate(store)
    finally:
        limits.SNAPSHOT_COMMITS_MIN = least  # type: ignore[misc]


def make_tiers(folder: pathlib.Path) -> None:
    """Make the golden store that has names for replicas: in a snapshot, and in the log after it."""
    least = limits.SNAPSHOT_COMMITS_MIN
    limits.SNAPSHOT_COMMITS_MIN = 4  # type: ignore[misc]  # so that a snapshot holds names
    try:
        with Store(create(folder, SimulatedEnvironment(8))) as store:
            log = store.repo.log

            def name(called: str, url: str, number: int) -> None:
                log.append_any(
                    lambda now: name_replica(now, name=called, url=url, store=f"{number:032x}")
                )

            name("cold", "s3://bucket/größe", 1)
            name("tape-2", "/mnt/tape/ckpts", 2)
            run = store.run("gpt")
            run.save({"model": {"w": torch.arange(500.0)}}, step=1, codec="planes")
            name("gone", "gs://other/x", 3)
            name("cold", "s3://bucket/moved", 1)
            log.append_any(lambda now: unname_replica(now, "gone"))
            name("near", "file:///mnt/near", 4)
            run.save({"model": {"w": torch.arange(500.0) + 1}}, step=2, codec="planes")
    finally:
        limits.SNAPSHOT_COMMITS_MIN = least  # type: ignore[misc]


def make_encrypted(folder: pathlib.Path) -> None:
    """Make the golden store of encrypted objects: of one segment and of several; a rotated key.

    The users' keys are 32 times 7 and a one, then bytes from 0 on.
    """
    environment = SimulatedEnvironment(9)
    first, second = UserKey(b"\7" * 31 + b"\1"), UserKey(bytes(range(32)))
    noise = np.random.default_rng(9).integers(0, 256, 150_000, np.uint8)
    with Store(create(folder, environment, first)) as store:
        run = store.run("sealed", metrics={"loss": "min"})
        state = {"model": {"noise": torch.from_numpy(noise), "w": torch.arange(300.0)}, "epoch": 1}
        run.save(state, step=1, metrics={"loss": 0.5}, codec="raw")
        state["model"]["w"] += 1  # type: ignore[index]
        run.save(state, step=2, tags=["good"], codec="planes")
        environment.sleep(60)
        keyring.rotate(store.repo.backend, first, second, environment=environment)


def make(folder: pathlib.Path) -> None:
    """Make the golden store in a folder that does not exist yet."""
    environment = SimulatedEnvironment(1)
    opened = create(folder, environment)
    state: dict[str, Any] = {"model": tensors(), "extra": others()}
    with Store(opened) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        run.save(state, step=1, metrics={"loss": 0.5}, adapters=[MONEY])
        environment.sleep(60)
        run.annotate(1, {"bleu": 31.0})
        state["model"]["float16"] = torch.full((100,), -1.5, dtype=torch.float16)
        run = store.run("gpt", metrics={"loss": "min", "acc": "max"})
        run.save(
            state,
            step=2,
            metrics={"loss": float("nan"), "acc": float("inf")},
            tags=["good"],
            metadata={"lr": 0.001, "note": "größer", "layers": [1, 2]},
            adapters=[MONEY],
        )
        run.tag(1, "first")
        run.tag(1, "gone")
        run.untag("gone")
        noise = np.random.default_rng(5).integers(0, 256, 70_000, np.uint8)
        state = {"weights": torch.from_numpy(noise), "bias": torch.arange(300.0)}
        store.run("raw").save(state, step=0, codec="raw")
        store.run("zstd/a").save({"bias": torch.arange(300.0)}, step=0, codec="zstd")


if __name__ == "__main__":
    place = pathlib.Path(sys.argv[1])
    kinds = {"v1": make, "v1-blocks": make_blocks, "v1-recipes": make_recipes}
    kinds["v1-delta"] = make_delta
    kinds["v1-aged"] = make_aged
    kinds["v1-replica"] = make_replica
    kinds["v1-again"] = make_again
    kinds["v1-encrypted"] = make_encrypted
    kinds["v1-tiers"] = make_tiers
    kinds["v1-arranged"] = make_arranged
    kinds[place.name](place)
