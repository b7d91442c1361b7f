"""The error tree: its shape, its codes, and that it survives a process pool."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

import ckptstore
from ckptstore import errors
from ckptstore.errors import CkptStoreError, CorruptObjectError

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
