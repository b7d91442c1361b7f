"""The names that users may rely on."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
from rankkit.titan import import_without_triton

import ckptstore
from ckptstore import errors

MODULES = sorted(module.name for module in pkgutil.walk_packages(ckptstore.__path__, "ckptstore."))


def test_root_names_are_these() -> None:
    """A name that is added or taken away is a decision, made here."""
    assert sorted(set(ckptstore.__all__) - set(errors.__all__)) == [
        "DivergenceGuard", "EarlyStopping", "Encoding", "LazyTensor", "LazyVersion", "PendingSave",
        "Progress", "Receipt", "ReplicaInfo", "ResumeReport", "RoleBytes", "Run", "RunInfo",
        "Store", "TypeAdapter", "Version", "Witness", "mend_keys", "mend_superblock", "open",
        "rotate_key",
    ]  # fmt: skip
    assert len(ckptstore.__all__) == len(set(ckptstore.__all__))


def test_every_error_is_a_name_of_the_package() -> None:
    """`except ckptstore.RunNotFoundError` works, and no class of the tree is left out."""
    tree, waiting = set(), [errors.CkptStoreError]
    while waiting:
        tree.add(kind := waiting.pop())
        waiting += [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    assert {kind.__name__ for kind in tree} == set(errors.__all__)
    assert {getattr(ckptstore, kind.__name__) for kind in tree} == tree
    with pytest.raises(ckptstore.StoreNotFoundError):
        ckptstore.open("memory://nobody-made-it")


def test_root_names_resolve() -> None:
    """Every lazily exported name is there, once, and listed by `dir`."""
    for name in ckptstore.__all__:
        value = getattr(ckptstore, name)
        assert value is getattr(ckptstore, name)
        assert inspect.getdoc(value)
    assert set(ckptstore.__all__) <= set(dir(ckptstore))


def test_misspelled_name_is_an_attribute_error() -> None:
    """The lazy export does not hide mistakes."""
    with pytest.raises(AttributeError, match="Stroe"):
        _ = ckptstore.Stroe  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # torchtitan compiles
@pytest.mark.parametrize("name", MODULES)
def test_modules_declare_what_they_export(name: str) -> None:
    """Everything in `__all__` is there; what has a public name has a docstring."""
    if name.endswith(".torchtitan"):
        import_without_triton()
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    listed = {each: getattr(module, each) for each in getattr(module, "__all__", [])}
    own = {each: value for each, value in vars(module).items() if not each.startswith("_")}
    for each, value in (own | listed).items():
        if each not in listed and getattr(value, "__module__", None) != name:
            continue
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), f"{name}.{each} has no docstring"
