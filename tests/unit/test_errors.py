"""Errors, limits and arguments: each is typed, told with its cause, and documented."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends.base import Buffers
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.errors import (
    CkptStoreError,
    ConflictError,
    CorruptObjectError,
    CorruptTensorError,
    InvalidInputError,
    TornStateError,
    VersionNotFoundError,
)
from ckptstore.repo import create_on
from ckptstore.states.load import LoadRequest
from ckptstore.states.save import SaveRequest

ALL: list[type[CkptStoreError]] = [getattr(errors, name) for name in errors.__all__]
GROUPS = [cls for cls in ALL if CkptStoreError in cls.__bases__]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md"


def _own_bases(cls: type) -> list[type]:
    return [base for base in cls.__bases__ if issubclass(base, CkptStoreError)]


def test_everything_descends_from_one_root() -> None:
    """`except CkptStoreError` catches everything, and `__all__` is complete and sorted."""
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert defined == set(errors.__all__)
    assert list(errors.__all__) == sorted(errors.__all__)
    assert all(issubclass(cls, CkptStoreError) for cls in ALL)


def test_the_drawn_tree_is_the_tree() -> None:
    """The picture in the module's docstring shows every class below its parent."""
    drawn: list[tuple[int, str, str]] = []
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        found = re.match(r"(?P<lead>[ |`-]*)(?P<name>\w+Error)\b(?: \((?P<builtin>\w+)\))?", line)
        if found and found["name"] in errors.__all__:
            drawn.append((len(found["lead"]), found["name"], found["builtin"] or ""))
    assert sorted(name for _, name, _ in drawn) == sorted(errors.__all__)
    parents: dict[int, str] = {}
    for indent, name, builtin in drawn:
        cls = getattr(errors, name)
        parents[indent] = name
        above = [parents[other] for other in sorted(parents) if other < indent]
        if above:
            assert [base.__name__ for base in _own_bases(cls)] == [above[-1]]
        extra = [base.__name__ for base in cls.__bases__ if base not in _own_bases(cls)]
        assert extra == ([builtin] if builtin else []) or cls is CkptStoreError
        for deeper in [other for other in parents if other > indent]:
            del parents[deeper]


def test_kinds_are_unique_and_stable() -> None:
    """Programs match on kinds: no two classes share one, and these stay as they are."""
    kinds = {cls.__name__: cls.kind for cls in ALL}
    assert len(set(kinds.values())) == len(kinds)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", kind) for kind in kinds.values())
    assert all("kind" in vars(cls) for cls in ALL)
    for name, kind in {
        "CorruptTensorError": "corrupt_tensor",
        "VersionNotFoundError": "version_not_found",
        "AmbiguousWriteError": "storage_ambiguous",
        "UnsafeBackendError": "unsafe_backend",
        "StateError": "state",
    }.items():
        assert kinds[name] == kind


def test_exit_codes_are_one_a_group() -> None:
    """What a shell script sees tells the groups apart, and a class has its group's code."""
    codes = {cls: cls.exit_code for cls in GROUPS}
    assert len(set(codes.values())) == len(codes)
    assert CkptStoreError.exit_code == 1
    assert 0 not in codes.values()
    for cls in ALL:
        group = next((group for group in GROUPS if issubclass(cls, group)), None)
        assert cls.exit_code == (group.exit_code if group else 1)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(cls: type[CkptStoreError]) -> None:
    """A worker process's error arrives whole: class, message, hint."""
    error = cls("pack ab/12 is cut short", hint="run verify")

    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes

    assert type(again) is cls
    assert (again.message, again.hint, str(again)) == (error.message, error.hint, str(error))


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_errors_say_what_and_what_next(cls: type[CkptStoreError]) -> None:
    """The text is the message, and after a dash the hint."""
    assert str(cls("it broke")) == "it broke"
    assert str(cls("it broke", hint="mend it")) == "it broke -- mend it"


def test_natural_builtins_catch_them() -> None:
    """Who knows only Python's own exceptions catches the right ones."""
    assert issubclass(errors.InvalidInputError, ValueError)
    assert issubclass(errors.NotFoundError, LookupError)
    assert issubclass(errors.StorageError, OSError)
    assert issubclass(errors.StateError, TypeError)
    assert issubclass(errors.TensorIndexError, IndexError)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_errors_are_documented(cls: type[CkptStoreError]) -> None:
    """Each class has its row, with kind and exit code, in docs/reference/errors.md."""
    row = f"| `{cls.__name__}` | `{cls.kind}` | {cls.exit_code} |"
    assert row in PAGE.read_text(encoding="utf-8")


def test_an_error_of_a_load_lets_go_of_what_was_read(tmp_path: Path) -> None:
    """No error is its own cause: a cycle would keep a manifest in memory that was refused."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        store.run("gpt").save({"a": 1}, step=1)
    next((tmp_path / "store" / "manifests").rglob("*.manifest")).write_bytes(b"damaged")
    with ckptstore.open(tmp_path / "store") as store, pytest.raises(CorruptObjectError) as caught:
        store.load("gpt@1")
    links: list[BaseException] = []
    found: BaseException | None = caught.value
    while found is not None:
        assert all(found is not link for link in links)
        links.append(found)
        found = found.__cause__


class _Between(WrapperBackend):
    """Calls a function once, before or after a pack is read."""

    before: Callable[[], object] | None = None
    after: Callable[[Sequence[memoryview]], object] | None = None

    def read_into(self, key: str, offset: int, buffers: Buffers) -> None:
        before, self.before = self.before, None
        if before is not None:
            before()
        self.inner.read_into(key, offset, buffers)
        after, self.after = self.after, None
        if after is not None:
            after(buffers)


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> _Between:
    """Return storage with a hook."""
    return _Between(MemoryBackend(f"causes/{request.node.nodeid}"))


@pytest.fixture
def store(storage: _Between) -> ckptstore.Store:
    """Return a store of two versions that share nothing."""
    store = ckptstore.Store(create_on(storage))
    for step in (1, 2):
        store.run("r").save({"w": torch.randn(5000), "step": step}, step=step, codec="raw")
    return store


def _collect(store: ckptstore.Store) -> None:
    for _ in range(2):
        store.gc(grace_s=0, orphan_age_s=0)


def _delete(store: ckptstore.Store) -> None:
    store.remove(["r@1"])
    _collect(store)


def _keep_the_record(store: ckptstore.Store) -> None:
    store.age(["r@1"], "record")
    _collect(store)


def _move(store: ckptstore.Store) -> None:
    """Round the weights of a version, which then lie in a pack of their own."""
    store.age(["r@1"], "weights-bf16", lossy="bf16")
    _collect(store)


CHANGES: dict[str, tuple[Callable[[ckptstore.Store], object], type[CkptStoreError], str]] = {
    "deleted": (_delete, VersionNotFoundError, "was deleted while it was read"),
    "reduced": (_keep_the_record, VersionNotFoundError, "was reduced to its record while"),
    "moved": (_move, ConflictError, "was moved while it was read"),
}
LOADS: dict[str, Callable[[ckptstore.Store], Any]] = {
    "load": lambda store: store.load("r@1"),
    "into": lambda store: store.load("r@1", into={"w": torch.zeros(5000), "step": 0}),
    "load_into": lambda store: store.load_into("r@1", {"w": torch.zeros(5000)}),
    "lazy": lambda store: store.version("r@1")["w"].load(),
    "slice": lambda store: store.version("r@1")["w"][5:9],
    "lazy state": lambda store: store.version("r@1").load(),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("how", LOADS)
@pytest.mark.short("load-|slice")
def test_a_version_that_changed_meanwhile_is_not_damaged(
    store: ckptstore.Store, storage: _Between, how: str, what: str
) -> None:
    """A trainer that rolls back on damage need not: the error names what became of it."""
    change, kind, said = CHANGES[what]
    storage.before = lambda: change(store)
    with pytest.raises(kind, match=rf"r@1.* {said}"):
        LOADS[how](store)
    assert store.verify().ok


def test_a_pack_that_is_gone_is_damage(store: ckptstore.Store, storage: _Between) -> None:
    """Of a version that nobody deleted."""
    for info in list(storage.list("packs/")):
        storage.delete(info.key)
    for load in LOADS.values():
        with pytest.raises(CorruptTensorError, match="the pack is gone"):
            load(store)


@pytest.mark.parametrize("codec", ["raw", "planes", "zstd"])
def test_a_target_that_another_thread_changes_is_not_damage(
    storage: _Between, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored proves sound on a second look, and the error names the tensor."""
    store = ckptstore.Store(create_on(storage))
    store.run("r").save({"w": torch.arange(50_000.0)}, step=1, codec=codec)
    target = torch.zeros(50_000)
    if codec == "raw":
        storage.after = lambda _: target.fill_(7.0)
    else:
        from ckptstore.objects import piece_reader

        decode, told = piece_reader._decode, [1]

        def changing(*given: Any) -> None:  # noqa: ANN401 - as the function takes
            decode(*given)
            if told:
                told.pop()
                target.fill_(7.0)

        monkeypatch.setattr(piece_reader, "_decode", changing)
    with pytest.raises(TornStateError, match=r"tensor w: .* what is stored is sound"):
        store.load("r@1", into={"w": target})
    assert torch.equal(store.load("r@1")["w"], torch.arange(50_000.0))


@pytest.mark.parametrize(
    "target",
    [torch.zeros(7), torch.zeros(5000, dtype=torch.int32), torch.zeros(5000).to("meta")],
    ids=["shape", "dtype", "meta"],
)
def test_a_target_that_does_not_fit_is_the_callers(
    store: ckptstore.Store, storage: _Between, target: object
) -> None:
    """Refused before anything is read, by its name."""
    storage.before = lambda: pytest.fail("something was read")
    with pytest.raises(InvalidInputError, match="w"):
        store.load("r@1", into={"w": target, "step": 0})


def test_latest_valid_passes_over_what_was_deleted(
    store: ckptstore.Store, storage: _Between
) -> None:
    """It goes on with the version before, and calls nothing damaged."""

    def delete() -> None:
        store.remove(["r@2"], force=True)
        _collect(store)

    storage.before = delete
    assert store.load("r@latest-valid")["step"] == 1


UNITS = {"KIB", "MIB", "GIB"}


def test_every_limit_has_a_source() -> None:
    """A number without a reason cannot be judged by who wants to change it."""
    lines = inspect.getsource(limits).splitlines()
    reasons: dict[str, str] = {}
    comment = ""
    for above, line in zip(["", *lines], lines, strict=False):
        if line.startswith("#"):
            comment = f"{comment} {line}" if above.startswith("#") else line
        elif found := re.match(r"([A-Z][A-Z0-9_]*): Final = [^#]*(#.*)?", line):
            reasons[found[1]] = found[2] or comment
        elif not line.strip():
            comment = ""
    unexplained = [name for name, text in reasons.items() if "Source:" not in text]
    assert set(unexplained) <= UNITS
    assert set(reasons) == {name for name in vars(limits) if name.isupper()}


def test_sizes_are_ordered() -> None:
    """A default lies within what readers accept, and small things within large ones."""
    assert limits.CHUNK_BYTES_MIN <= limits.CHUNK_BYTES_DEFAULT <= limits.CHUNK_RAW_BYTES_MAX
    assert limits.SMALL_TENSOR_BYTES <= limits.SLAB_BYTES <= limits.CHUNK_BYTES_DEFAULT
    assert limits.CHUNK_RAW_BYTES_MAX < limits.CHUNK_STORED_BYTES_MAX < limits.PACK_BYTES_MAX
    assert limits.CHUNK_RAW_BYTES_MAX < limits.HOST_BYTES_DEFAULT
    assert limits.MANIFEST_STORED_BYTES_MAX <= limits.MANIFEST_RAW_BYTES_MAX
    assert limits.METADATA_BYTES_MAX < limits.COMMIT_BYTES_MAX
    assert limits.COMMIT_NUMBER_MAX // limits.COMMITS_PER_FOLDER < 10**6


def test_limits_are_positive() -> None:
    """Zero or less would refuse everything."""
    values = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert all(value > 0 for value in values.values())


INSIDE = {"together"}
"""Fields of a load that no caller gives."""
OF_THE_RUN = {"run", "directions"}
"""Fields of a save that come from the run, and not from the caller."""


def _words(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of a method, and the step, which may also stand alone."""
    parameters = inspect.signature(method).parameters.values()
    return {
        one.name: one for one in parameters if one.kind is one.KEYWORD_ONLY or one.name == "step"
    }


def test_both_saves_take_the_record_of_a_save() -> None:
    """A field that one of the two forgets, or takes with another default, shows here."""
    now, later = _words(ckptstore.Run.save), _words(ckptstore.Run.save_async)
    asked = {one.name for one in fields(SaveRequest)} - OF_THE_RUN
    assert set(now) == asked | {"retain"}
    assert set(later) == set(now) | {"if_busy", "stage"}
    assert {name: later[name] for name in now} == now


@pytest.mark.parametrize(
    ("method", "beside"),
    [
        (ckptstore.LazyVersion.load, set()),
        (ckptstore.Store.load, {"fall_through", "refill", "group"}),
        (ckptstore.Run.load, {"fall_through", "refill", "group"}),
    ],
)
def test_each_load_takes_the_record_of_a_load(method: Callable[..., Any], beside: set[str]) -> None:
    """With the same defaults; what is besides says where the bytes may come from."""
    words = _words(method)
    found = {one.name: one.default for one in fields(LoadRequest) if one.name not in INSIDE}
    assert {name: one.default for name, one in words.items() if name not in beside} == found
    assert set(words) - set(found) == beside


def test_the_plain_part_of_a_save_leaves_the_state_behind() -> None:
    """It goes to another process, where adapters and callbacks of the user cannot go."""
    adapter: Any = lambda: None  # noqa: E731 - what no pickle holds
    request = SaveRequest(
        run="gpt", step=3, directions={"loss": "min"}, metrics={"loss": 1.5}, tags=["a"],
        metadata={"n": (1, 2)}, codec="raw", derive=False, adapters=[adapter], plain=True,
        progress=adapter,
    )  # fmt: skip
    plain = request.portable()
    assert type(plain) is WriteRequest
    assert plain == WriteRequest(
        run="gpt", step=3, directions={"loss": "min"}, metrics={"loss": 1.5}, tags=("a",),
        metadata={"n": [1, 2]}, codec="raw", derive=False,
    )  # fmt: skip
    assert pickle.loads(pickle.dumps(plain)) == plain  # noqa: S301 - our own
