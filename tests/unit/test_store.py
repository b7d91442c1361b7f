"""The facade, end to end on memory: save, load, refs, tags, metrics, usage, verify."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damaging import flip_pack

import ckptstore
from ckptstore import errors


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def _assert_same(expected: object, found: object) -> None:
    assert type(expected) is type(found)
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert expected.dtype == found.dtype
        assert torch.equal(expected, found)
    elif isinstance(expected, dict):
        assert isinstance(found, dict)
        assert list(expected) == list(found)
        for key, value in expected.items():
            _assert_same(value, found[key])
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        for mine, theirs in zip(expected, found, strict=True):
            _assert_same(mine, theirs)
    else:
        assert expected == found


def test_a_training_state_comes_back_and_trains_on_alike(store: ckptstore.Store) -> None:
    """Model, optimizer and generator states are equal after a load, and so is the next step."""
    model, optimizer = _training()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": {"torch": torch.get_rng_state()},
        "data": {"epoch": 3, "position": 1234},
    }
    store.run("small").save(state, step=3)
    loaded = store.load("small")
    _assert_same(state, loaded)

    def one_more(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(8, 40)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    torch.set_rng_state(loaded["rng"]["torch"])
    expected = one_more(model, optimizer)
    other, other_optimizer = _training()
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    torch.set_rng_state(loaded["rng"]["torch"])

    assert torch.equal(expected, one_more(other, other_optimizer))


def test_refs_name_versions(store: ckptstore.Store) -> None:
    """Latest, steps, best, tags, steps back and ids all name the version that they should."""
    run = store.run("r", metrics={"loss": "min", "acc": "max"})
    ids = {}
    for step, loss, acc in ((1, 3.0, 0.1), (2, 1.0, 0.9), (3, math.nan, 0.5), (4, 2.0, 0.9)):
        tags = ["keep"] if step == 3 else []
        version = run.save(
            {"x": torch.tensor(step)}, step=step, metrics={"loss": loss, "acc": acc}, tags=tags
        )
        ids[step] = version.id
    named = {
        "r": 4, "r@latest": 4, "r@2": 2, "r@best:loss": 2, "r@best:acc": 2, "r@keep": 3, "r@~1": 3,
        f"#{ids[1][:12]}": 1,
    }  # fmt: skip

    assert named == {ref: store.resolve(ref).step for ref in named}
    assert [run.resolve(ref).step for ref in ("latest", 2, "keep")] == [4, 2, 3]
    assert ids[3] == store.resolve("r@4").parent
    assert store.load("r@best:loss")["x"].item() == 2


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"engine": "fibre"}, "engine is one of auto, process, thread, not 'fibre'"),
        ({"engine": None}, "engine is one of"),
        ({"codec": "lzma"}, "codec is one of auto, planes"),
        ({"codec": 3}, "codec is one of"),
        ({"in_flight": 0}, "in_flight is an integer from 1 on, not 0"),
        ({"in_flight": None}, "in_flight is an integer"),
        ({"in_flight": True}, "in_flight is an integer"),
        ({"staging_bytes": -1}, "staging_bytes is an integer"),
        ({"staging_bytes": "4GiB"}, "staging_bytes is an integer from 1 on, not '4GiB'"),
        ({"staging_bytes": 1e9}, "staging_bytes is an integer"),
        ({"host_bytes": 0}, "host_bytes is an integer"),
        ({"host_bytes": "1"}, "host_bytes is an integer"),
        ({"workers": 0}, "workers is an integer"),
        ({"workers": 1.5}, "workers is an integer"),
    ],
)
def test_options_are_checked_before_a_store_is_made(
    tmp_path: Path, option: dict[str, Any], said: str
) -> None:
    """What could only fail at the first save is refused by open, which then creates nothing."""
    with pytest.raises(errors.InvalidInputError) as caught:
        ckptstore.open(tmp_path / "new", create=True, **option)
    assert said in caught.value.message
    assert not (tmp_path / "new").exists()


def test_options_may_be_integers_of_numpy(tmp_path: Path) -> None:
    """They become plain ones."""
    with ckptstore.open(tmp_path / "new", create=True, workers=np.int64(2)) as store:  # type: ignore[arg-type]  # that is the test
        assert type(store.repo.options.workers) is int


def test_one_tag_or_ref_is_no_list_of_letters(store: ckptstore.Store) -> None:
    """A text where several are expected is refused, with how to write it; nothing is written."""
    run = store.run("r")
    run.save({"x": 1}, step=1)
    one: Any = "release"
    for save in (run.save, run.save_async):
        with pytest.raises(errors.InvalidInputError, match="must be a list") as caught:
            save({"x": 2}, step=2, tags=one)
        assert caught.value.hint == "write tags=['release']"
    with pytest.raises(errors.InvalidInputError, match="must be a list") as caught:
        run.save({"x": 2}, step=2, tags=b"release")  # type: ignore[arg-type]  # that is the test
    assert caught.value.hint == "write tags=['release']"
    ref: Any = "r@1"
    for refused in (store.remove, store.undelete, lambda refs: store.age(refs, "record"),
                    store.verify):  # fmt: skip
        with pytest.raises(errors.InvalidInputError, match="must be a list") as caught:
            refused(ref)
        assert caught.value.hint == "write refs=['r@1']"
    assert [(version.step, version.tags) for version in store.versions()] == [(1, ())]


def test_tags_move_and_go(store: ckptstore.Store) -> None:
    """A tag names one version at a time, and nothing once it is taken away."""
    run = store.run("r")
    for step in (1, 2):
        run.save({"x": step}, step=step)
    run.tag(1, "release")
    assert run.resolve(1).tags == ("release",)
    run.tag("latest", "release")
    assert (run.resolve(1).tags, run.resolve(2).tags) == ((), ("release",))
    run.untag("release")
    with pytest.raises(errors.VersionNotFoundError, match="release"):
        run.resolve("release")


def test_the_store_takes_a_tag_from_the_version_that_has_it(store: ckptstore.Store) -> None:
    """As ``Store.tag``, by any ref; a version without the tag loses nothing of another's."""
    for step in (1, 2):
        store.run("r").save({"x": step}, step=step)
    store.tag("r@1", "release")
    with pytest.raises(errors.VersionNotFoundError, match="has no tag 'release'") as caught:
        store.untag("r@2", "release")
    assert "r@1" in caught.value.hint
    assert store.resolve("r@release").step == 1
    assert store.untag("r@release", "release").tags == ()
    with pytest.raises(errors.VersionNotFoundError, match="has no tag"):
        store.untag("r@1", "release")


def test_metrics_arrive_later(store: ckptstore.Store) -> None:
    """Annotations add to what the save brought, replace by name, and count for best."""
    run = store.run("r", metrics={"bleu": "max"})
    for step in (1, 2):
        run.save({"x": step}, step=step, metrics={"loss": 1.0 / step})
    run.annotate(1, {"bleu": 31.0})
    run.annotate(2, {"bleu": 30.0, "loss": 0.25})

    assert dict(run.resolve(1).metrics) == {"loss": 1.0, "bleu": 31.0}
    assert dict(run.resolve(2).metrics) == {"loss": 0.25, "bleu": 30.0}
    assert run.resolve("best:bleu").step == 1


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_and_torch_are_taken(store: ckptstore.Store) -> None:
    """A step out of an array or a tensor is that step, and a loss with its graph is no warning."""
    run = store.run("r")
    loss = torch.tensor(1.5, requires_grad=True)
    first = run.save({"x": 1}, step=np.int64(7), metrics={"loss": loss})  # type: ignore[arg-type,dict-item]
    second = run.save({"x": 2}, step=torch.tensor(8), metrics={"loss": np.float32(0.5)})  # type: ignore[arg-type,dict-item]

    assert (type(first.step), first.step, type(second.step), second.step) == (int, 7, int, 8)
    assert (first.metrics["loss"], second.metrics["loss"]) == (1.5, 0.5)
    for wrong in (True, 1.0, "1", None, 2**63):
        with pytest.raises(errors.InvalidInputError, match="a step is an integer"):
            run.save({"x": 3}, step=wrong)  # type: ignore[arg-type]


def test_an_unchanged_state_costs_no_pack(store: ckptstore.Store) -> None:
    """A second save of the same state shares every piece; its content digest is the same."""
    run = store.run("r")
    state = {"w": torch.randn(500, 500), "small": [torch.randn(5) for _ in range(10)]}
    first, second = (run.save(state, step=step) for step in (1, 2))

    assert first.content == second.content
    assert sum(part.new + part.stored for part in second.roles.values()) == 0
    assert store.stats().objects["packs"].count == 1


def test_equal_tensors_in_one_save_are_stored_once(store: ckptstore.Store) -> None:
    """Equal bytes under two names cost the bytes once, and stay two tensors after a load."""
    weight = torch.randn(400, 400)
    version = store.run("r").save({"a": weight, "b": weight.clone(), "tied": weight}, step=1)
    loaded = store.load("r")

    assert weight.nbytes == sum(part.new for part in version.roles.values())
    assert loaded["a"].data_ptr() == loaded["tied"].data_ptr()
    assert loaded["a"].data_ptr() != loaded["b"].data_ptr()


def test_partial_loads(store: ckptstore.Store) -> None:
    """Patterns choose leaves; a pattern that matches nothing is an error that helps."""
    model, optimizer = _training()
    store.run("r").save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=1)

    assert list(store.load("r", include=["model.*"])) == ["model"]
    assert "optimizer" not in store.load("r", exclude=["optimizer"])
    with pytest.raises(errors.TensorNotFoundError, match="modle"):
        store.load("r", include=["modle.*"])


def test_loading_into_existing_tensors(store: ckptstore.Store) -> None:
    """The tensors given are filled in place; a shape that differs is refused by name."""
    model, _ = _training()
    store.run("r").save({"model": model.state_dict()}, step=1)
    torch.manual_seed(9)
    other = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 4))
    target = other.state_dict()
    store.load("r", into={"model": target})

    _assert_same(model.state_dict(), other.state_dict())
    with pytest.raises(errors.InvalidInputError, match=r"0\.weight"):
        store.load("r", into={"model": {"0.weight": torch.zeros(3, 3)}})


def test_lazy_slices_equal_real_ones(store: ckptstore.Store) -> None:
    """Any index of a lazy tensor gives what the same index of the tensor gives."""
    big = torch.arange(3000 * 700, dtype=torch.float32).reshape(3000, 700)
    channels = torch.randn(6, 3, 50, 60).to(memory_format=torch.channels_last)
    store.run("r").save({"big": big, "ch": channels, "scalar": torch.tensor(2.5)}, step=1)
    lazy = store.version("r")
    rows = torch.tensor([1, 2999])
    indices: list[Any] = [
        0, -1, slice(10, 20), slice(None, None, 7), (5, slice(3, 9)), (slice(0, 5), 3),
    ]  # fmt: skip
    indices += [(2, 3), ..., (..., 4), slice(5, 5), slice(2990, 9999), (-3, -4), rows, None]
    for index in indices:
        assert torch.equal(big[index], lazy["big"][index]), index
    several: list[Any] = [2, slice(1, 3), (1, slice(None), 4), (..., 7)]
    for index in several:
        assert torch.equal(channels[index], lazy["ch"][index]), index

    assert lazy["scalar"].load().item() == 2.5
    assert lazy["big"].shape == (3000, 700)
    assert len(lazy["big"]) == 3000
    wrongs: list[Any] = [3000, -3001, (0, 700), "x", slice(None, None, -1)]
    for wrong in wrongs:
        with pytest.raises(IndexError) as caught:
            lazy["big"][wrong]
        assert isinstance(caught.value, ckptstore.CkptStoreError)


@pytest.mark.parametrize("change", [{"shape": (1 << 62, 8)}, {"dtype": "float3"}])
def test_a_slice_of_a_hostile_record_is_refused(
    store: ckptstore.Store, change: dict[str, Any]
) -> None:
    """A record whose size is not that of its dtype and shape gives an error and takes no memory."""
    version = store.run("r").save({"t": torch.arange(8)}, step=1)
    manifest = store.repo.manifests.load(version)
    lying = (manifest.tensors[0].replace(**change),)
    store.repo.manifests.keep(version.manifest_digest, replace(manifest, tensors=lying))
    with pytest.raises(errors.CorruptObjectError):
        store.version("r")["t"][2:5]


def test_lazy_tensors_can_be_iterated(store: ckptstore.Store) -> None:
    """Iteration ends where the tensor ends."""
    store.run("r").save({"t": torch.arange(5)}, step=1)

    assert [row.item() for row in store.version("r")["t"]] == [0, 1, 2, 3, 4]


def test_bad_states_and_names_write_nothing(store: ckptstore.Store) -> None:
    """What cannot be saved raises before a byte is written, and names what is wrong."""
    run = store.run("r")
    before = store.stats().objects
    with pytest.raises(errors.StateError, match=r"model\.hook"):
        run.save({"model": {"hook": lambda: 1}}, step=1)
    for arguments in ({"step": -1}, {"step": 1, "tags": ["12"]}, {"step": 1, "codec": "lzma"}):
        with pytest.raises(errors.InvalidInputError):
            run.save({"x": torch.ones(9)}, **arguments)

    assert before == store.stats().objects
    assert store.versions() == []


def test_missing_things_have_their_own_errors(store: ckptstore.Store, tmp_path: Path) -> None:
    """No store, no run, no version: three errors, each with the next step."""
    with pytest.raises(errors.StoreNotFoundError, match="ckptstore init"):
        ckptstore.open(tmp_path / "nothing")
    with pytest.raises(errors.RunNotFoundError):
        store.load("nobody")
    store.run("r").save({"x": 1}, step=1)
    with pytest.raises(errors.VersionNotFoundError):
        store.load("r@7")


def test_a_read_only_store_refuses_writes(tmp_path: Path) -> None:
    """Read-only stores load and refuse saves, tags and annotations."""
    with ckptstore.open(tmp_path, create=True) as writer:
        writer.run("r").save({"x": torch.ones(3)}, step=1)
    with ckptstore.open(tmp_path, read_only=True) as reader:
        assert reader.load("r")["x"].sum().item() == 3
        writes: list[Callable[[], object]] = [
            lambda: reader.run("r").save({"x": 2}, step=2),
            lambda: reader.tag("r", "t"),
            lambda: reader.annotate("r", {"m": 1.0}),
        ]
        for write in writes:
            with pytest.raises(errors.ReadOnlyError):
                write()


def test_verify_finds_a_sound_store_sound(store: ckptstore.Store) -> None:
    """Both levels check all versions and report nothing; shared chunks are read once."""
    run = store.run("r")
    state = {"w": torch.randn(700, 700)}
    for step in (1, 2, 3):
        run.save(state, step=step)
    full, records = store.verify(), store.verify(level="records")

    assert (True, 3, state["w"].nbytes) == (full.ok, full.versions_count, full.read_bytes)
    assert (records.ok, records.read_bytes) == (True, 0)


def test_empty_states_are_versions_too(store: ckptstore.Store) -> None:
    """A state without tensors, or with empty ones, is saved without a pack."""
    run = store.run("r")
    run.save({}, step=0)
    run.save({"e": torch.empty(0, 5), "n": None}, step=1)

    assert run.load(0) == {}
    assert run.load(1)["e"].shape == (0, 5)
    assert store.stats().objects["packs"].count == 0


def test_a_direction_that_the_run_contradicts_is_refused_at_once(tmp_path: Path) -> None:
    """By the store that declared it and by one that was just opened; others may be added."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        run = store.run("r", metrics={"loss": "min"})
        run.save({"x": torch.ones(2)}, step=1, metrics={"loss": 1.0})
        with pytest.raises(errors.InvalidInputError, match="has the direction 'min'"):
            store.run("r", metrics={"loss": "max"})
    with ckptstore.open(tmp_path / "store") as store:
        with pytest.raises(errors.InvalidInputError, match="has the direction 'min'"):
            store.run("r", metrics={"loss": "max"})
        store.run("r", metrics={"loss": "min", "acc": "max"})
        store.run("other", metrics={"loss": "max"})


def test_arguments_of_another_type_are_errors_of_the_tree(store: ckptstore.Store) -> None:
    """A step for a ref, a list for directions and None for a location say what to write."""
    with pytest.raises(errors.InvalidRefError, match="write run@4"):
        store.load(4)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidRefError, match="not a ref"):
        store.resolve(None)  # type: ignore[arg-type]
    for wrong in (["loss"], "loss"):
        with pytest.raises(errors.InvalidInputError, match="must map names"):
            store.run("q", metrics=wrong)  # type: ignore[arg-type]
    for nowhere in (None, b"/data", 3):
        with pytest.raises(errors.InvalidUrlError, match="must be a URL or a path"):
            ckptstore.open(nowhere)  # type: ignore[arg-type]


def test_a_version_is_shown_in_a_line(store: ckptstore.Store) -> None:
    """Run, step, id and the first metrics; nothing of the rest."""
    state = {"x": torch.ones(2)}
    version = store.run("gpt").save(state, step=300, metrics={"val_loss": 1.0})
    assert repr(version) == f"<Version gpt@300 #{version.id[:8]} val_loss=1>"
    assert version.label == f"gpt@300 (#{version.id[:8]})"


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("modle.*", "did you mean 'model'"),
        ("model.wieght", "did you mean 'model.weight'"),
        (("model", "wieght"), "did you mean 'model.weight'"),
        ("qqq", "there is 'model', 'epoch'"),
    ],
)
def test_a_pattern_without_a_match_says_what_there_is(
    store: ckptstore.Store, pattern: str | tuple[str, ...], said: str
) -> None:
    """Something of a similar name, or what the state has at the top."""
    store.run("r").save({"model": {"weight": torch.ones(2)}, "epoch": 1}, step=1)
    with pytest.raises(errors.TensorNotFoundError, match=said):
        store.load("r", include=[pattern])


@pytest.mark.parametrize("gone", [False, True])
def test_damage_is_told_once(tmp_path: Path, gone: bool) -> None:
    """The message has tensor, cause, pack and place, each one time."""
    with ckptstore.open(tmp_path / "store", create=True, codec="zstd") as store:
        store.run("r").save({"w": torch.arange(100_000)}, step=1)
        (pack,) = tmp_path.glob("store/packs/*/*.pack")
        if gone:
            pack.unlink()
        else:
            flip_pack(pack)
        with pytest.raises(errors.CorruptTensorError) as caught:
            store.load("r")
    what = "the pack is gone" if gone else "stored bytes do not match their checksum"
    assert caught.value.message == f"tensor w: {what} (pack {pack.stem}, byte 32)"


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    """Reading, saving and the log are refused alike; closing again is no error."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        run = store.run("r")
        run.save({"x": torch.ones(2)}, step=1)
    refused: list[Callable[[], object]] = [
        store.runs, store.log, store.verify, store.stats, run.load, run.versions,
        lambda: store.load("r"), lambda: run.save({"x": torch.ones(2)}, step=2),
        lambda: store.tag("r", "good"),
    ]  # fmt: skip
    for call in refused:
        with pytest.raises(errors.InvalidInputError, match="is closed"):
            call()
    store.close()


def test_stores_and_runs_are_containers(store: ckptstore.Store) -> None:
    """Stores of runs, runs of versions: length, iteration, ``in`` and brackets; never false."""
    run = store.run("gpt", metrics={"loss": "min"})
    assert (bool(store), len(store), list(store)) == (True, 0, [])
    assert (bool(run), len(run), list(run)) == (True, 0, [])
    assert "gpt" not in store
    for step in (100, 140):
        run.save({"w": torch.full((3,), float(step))}, step=step, metrics={"loss": -step})
    assert (len(store), [one.name for one in store]) == (1, ["gpt"])
    assert (len(run), [one.step for one in run]) == (2, [100, 140])
    assert all(ref in store for ref in ("gpt", "gpt@100", "gpt@best:loss"))
    assert not any(ref in store for ref in ("other", "gpt@3", "gpt@no such", "", 7))
    assert 140 in run
    assert "best:loss" in run
    assert 141 not in run
    assert None not in run
    found = store["gpt"]
    assert isinstance(found, ckptstore.Run)
    assert len(found) == 2
    best = store["gpt@best:loss"]
    assert isinstance(best, ckptstore.LazyVersion)
    assert run[140]["w"].load().tolist() == best["w"].load().tolist() == [140.0] * 3
    for ref in ("other", "gpt@7"):
        with pytest.raises(LookupError):
            store[ref]
    with pytest.raises(LookupError):
        run[7]
