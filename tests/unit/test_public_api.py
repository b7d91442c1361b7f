"""The public names, what an import costs, and what can be pickled."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rankkit.titan import import_without_triton

import ckptstore
from ckptstore import errors
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.sealing import UserKey
from ckptstore.errors import InvalidInputError, StoreNotFoundError
from ckptstore.repo import create_on

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


HEAVY = ("torch", "numpy", "fsspec", "s3fs", "gcsfs", "azure", "botocore", "aiohttp", "safetensors")


def _loaded_after(code: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has loaded after `code`."""
    probe = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    return {name for name in HEAVY if name in modules}


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`import ckptstore` costs what Python itself costs."""
    assert _loaded_after("import ckptstore") == set()


@pytest.mark.parametrize("module", ["ckptstore.cli.main", "ckptstore.store", "ckptstore.errors"])
def test_modules_of_the_command_line_load_nothing_heavy(module: str) -> None:
    """What every command imports leaves torch, numpy and the storage libraries alone."""
    assert _loaded_after(f"import {module}") == set()


@pytest.mark.parametrize(
    "module",
    [
        "ckptstore.catalog.catalog",
        "ckptstore.maintenance",
        "ckptstore.repo",
        "ckptstore.saver.child",
    ],
)
def test_lower_layers_do_not_load_torch(module: str) -> None:
    """Torch comes in with tensors and what stands on them, never below."""
    assert "torch" not in _loaded_after(f"import {module}")


@pytest.mark.parametrize(
    "words", [["ls"], ["log"], ["du"], ["ls", "--json"], ["tag", "--help"]], ids=" ".join
)
def test_catalog_commands_load_neither_torch_nor_storage_libraries(
    words: list[str], small_store: Path
) -> None:
    """Looking at a local store loads nothing heavy at all."""
    arguments = [*words, "--store", str(small_store)]
    code = f"from ckptstore.cli.main import run\nassert run({arguments}) == 0"

    assert _loaded_after(code) == set()


@pytest.fixture(scope="module")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with a few versions."""
    import ckptstore

    path = tmp_path_factory.mktemp("cost") / "ckpts"
    with ckptstore.open(path, create=True) as store:
        run = store.run("gpt", metrics={"val_loss": "min"})
        for step in range(5):
            run.save({"step": step, "text": "x"}, step=step, metrics={"val_loss": 1 / (step + 1)})
    return path


STATE = {"w": torch.arange(12.0), "n": 3}


def _loaded(data: bytes) -> Any:  # noqa: ANN401 - whatever was pickled
    return pickle.loads(data)  # noqa: S301 - our own


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    """Return a store with one version, opened with options of its own."""
    with ckptstore.open(tmp_path / "a", create=True, codec="raw", workers=1) as found:
        found.run("gpt", metrics={"loss": "min"}).save(STATE, step=1, metrics={"loss": 1.0})
        yield found


def test_another_process_reads_by_it(store: ckptstore.Store, tmp_path: Path) -> None:
    """Store, run, version and lazy version are the same in a process that was started for them."""
    run, lazy = store.run("gpt"), store.version("gpt@1")
    things = tmp_path / "things"
    things.write_bytes(pickle.dumps((store, run, lazy, lazy.info)))
    code = (
        "import pickle, sys, torch\n"
        "store, run, lazy, version = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert run.load('best:loss')['n'] == 3 and run._session is store._session\n"
        "assert lazy.id == version.id == run.head.id\n"
        "assert torch.equal(lazy['w'][2:4], torch.tensor([2.0, 3.0]))\n"
        "run.save({'w': torch.zeros(3)}, step=2)\n"
        "print(store.repo.options.codec, store.repo.options.workers)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(things)], cwd="/", capture_output=True, check=False
    )
    assert done.stdout.decode().split() == ["raw", "1"], done.stderr.decode()
    assert [version.step for version in store.versions(run="gpt")] == [1, 2]


def test_many_pickles_share_one_open_store(store: ckptstore.Store) -> None:
    """Unpickled again and again, one process has one store open; closed, it is opened again."""
    data = pickle.dumps(store)
    first = _loaded(data)
    assert _loaded(data) is first
    assert _loaded(pickle.dumps(store.run("gpt")))._session is first._session
    first.close()
    second = _loaded(data)
    assert second is not first
    assert second.load("gpt@1")["n"] == 3
    second.close()
    assert store.load("gpt@1")["n"] == 3  # the one that was pickled is nobody else's


def test_a_path_holds_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative location, and that of a key, mean what they meant where they were written."""
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("0f1e" * 16)
    Path("key").chmod(0o600)
    with ckptstore.open("a", create=True, encryption_key="file:key") as store:
        store.run("gpt").save(STATE, step=1)
        data = pickle.dumps(store)
    monkeypatch.chdir("/")
    with _loaded(data) as again:
        assert again.load("gpt@1")["n"] == 3


def test_no_key_is_in_a_pickle(tmp_path: Path) -> None:
    """The place of a key travels; a key itself is refused, that of a replica too."""
    key = bytes(range(32))
    for given in (key, UserKey(key)):
        with (
            ckptstore.open(tmp_path / "a", create=True, encryption_key=given) as store,
            pytest.raises(InvalidInputError, match="its key stays here") as caught,
        ):
            pickle.dumps(store)
        assert "file:PATH" in caught.value.hint
    with (
        ckptstore.open(
            tmp_path / "b", create=True, replicas={"cold": {"encryption_key": key}}
        ) as store,
        pytest.raises(InvalidInputError, match="the key of its replica 'cold' stays"),
    ):
        pickle.dumps(store)


def test_what_no_other_process_could_open(tmp_path: Path) -> None:
    """A store in memory, on a backend of its own, or with an option that cannot travel: refused."""
    with ckptstore.open(f"memory://{tmp_path}", create=True) as store:
        store.run("gpt").save(STATE, step=1)
        for thing in (store, store.run("gpt"), store.version("gpt@1")):
            with pytest.raises(InvalidInputError, match="in the memory of this process"):
                pickle.dumps(thing)
    with (
        ckptstore.Store(create_on(MemoryBackend(f"{tmp_path}/own"))) as store,
        pytest.raises(InvalidInputError, match="a backend of its own"),
    ):
        pickle.dumps(store)
    mixed = {"memory": {"url": f"memory://{tmp_path}", "session": lambda: 1}}
    with (
        ckptstore.open(tmp_path / "c", create=True, replicas=mixed) as store,
        pytest.raises(InvalidInputError, match="an option cannot be pickled"),
    ):
        pickle.dumps(store)


def test_a_live_write_back_stays(tmp_path: Path) -> None:
    """Two processes that write back the same runs would send everything twice."""
    with ckptstore.open(tmp_path / "a", create=True) as store:
        ckptstore.open(tmp_path / "b", create=True).close()
        store.add_replica("cold", tmp_path / "b")
        pickle.dumps(store)
        store.write_back("cold")
        with pytest.raises(InvalidInputError, match="writes back"):
            pickle.dumps(store)


def test_a_tensor_alone_is_not_pickled(store: ckptstore.Store) -> None:
    """A lazy tensor says what to pickle in its place."""
    with pytest.raises(InvalidInputError) as caught:
        pickle.dumps(store.version("gpt@1")["w"])
    assert "lazy version" in caught.value.hint


def test_a_store_that_is_gone_is_an_error_of_ours(store: ckptstore.Store, tmp_path: Path) -> None:
    """Unpickling opens: what is no longer there raises as opening does."""
    data = pickle.dumps(store)
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(StoreNotFoundError):
        _loaded(data)


def test_a_forked_process_opens_its_own(store: ckptstore.Store) -> None:
    """The store that a parent has open by a pickle is not used by its child."""
    data = pickle.dumps(store)
    mine = _loaded(data)
    child = os.fork()
    if not child:
        os._exit(int(_loaded(data) is mine))
    assert os.waitpid(child, 0)[1] == 0
    mine.close()
