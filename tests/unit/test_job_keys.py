"""Each key of a job file changes what it says, and nothing else; cold targets."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from inspect import isclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from coldbackend import ColdBackend, Shelf
from damaging import flip_object

import ckptstore
from ckptstore import errors
from ckptstore.backends import registry
from ckptstore.backends.memory import MemoryBackend, open_memory
from ckptstore.errors import InvalidInputError
from ckptstore.format.keys import commit_key, pack_key
from ckptstore.jobs import Job, JobReport, StepReport, read_job, run_job, work
from ckptstore.jobs.work import Overdue, problem_of
from ckptstore.model import Version
from ckptstore.store import Store

_LOSSES = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 3.0}
_HOURS = {1: 72.0, 2: 72.0, 3: 5.0, 4: 5.0}
"""Ages of versions in the source; the others are new."""
_numbers = itertools.count()
_shelf = Shelf()


def open_cold(url: str, **options: object) -> ColdBackend:
    """Open storage with classes, in memory; any option will do."""
    del options
    return ColdBackend(MemoryBackend(url.removeprefix("cold://")), _shelf)


def _packs(store: Store, version: Version) -> set[str]:
    return set(map(pack_key, store.repo.manifests.load(version).pieces.packs))


@pytest.fixture(scope="module", autouse=True)
def _scheme() -> Iterator[None]:
    """Let locations of the scheme ``cold`` be storage with classes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FACTORIES, "cold", f"{__name__}:open_cold")
        yield


@pytest.fixture(scope="module")
def trained() -> dict[str, dict[str, Any]]:
    """Return the objects of two stores.

    The source has versions 1 to 5 of one run, of which the first is damaged, and 9 of another. The
    target has version 1 of them, and version 2 unchecked and damaged. Both have two deleted ones,
    of which one was condemned half an hour ago.
    """
    hot, cold = (ckptstore.open(f"cold://made-{next(_numbers)}", create=True) for _ in range(2))
    with hot, cold:
        condemned = {}
        for store in (cold, hot):
            for step in (7, 8):
                store.run("old").save({"w": torch.full((9,), float(step))}, step=step)
            store.remove(["old@7"])
            condemned[store] = commit_key(store.gc().commit + 1)
            store.remove(["old@8"], force=True)
        run = hot.run("gpt", metrics={"loss": "min"})
        for step, loss in _LOSSES.items():
            state = {"w": torch.full((9,), float(step))}
            run.save(state, step=step, metrics={"loss": loss}, tags=["keep"] if step == 3 else ())
        hot.run("ft").save({"w": torch.full((9,), 9.0)}, step=9)
        hot.replicate(cold, ["gpt@1"])
        hot.replicate(cold, ["gpt@2"], check=False)
        for store, ref in ((hot, "gpt@1"), (cold, "gpt@2")):
            (pack,) = _packs(store, store.resolve(ref))
            flip_object(store.repo.backend, pack)
        spaces = [MemoryBackend(store.url.removeprefix("memory://")) for store in (hot, cold)]
        objects = []
        for store, space in zip((hot, cold), spaces, strict=True):
            commits = {v.step: commit_key(v.commit) for v in store.versions() if v.step in _HOURS}
            found = dict(space.objects)
            ages = {commits[step]: _HOURS[step] for step in commits} | {condemned[store]: 0.5}
            for key, age in ages.items():
                found[key] = found[key]._replace(modified_at=found[key].modified_at - age * 3600)
            objects.append(found)
    return {"hot": objects[0], "cold": objects[1]}


class World:
    """The two stores of one test, and what a job did to them."""

    def __init__(
        self, trained: dict[str, dict[str, Any]], folder: Path, patch: pytest.MonkeyPatch
    ) -> None:
        self.folder, self.spaces = folder, {}
        _shelf.classes.clear()
        for name, objects in trained.items():
            self.spaces[name] = MemoryBackend(f"job-{next(_numbers)}-{name}")
            for key, item in objects.items():
                self.spaces[name]._space.store(key, item)
        self.said: dict[str, object] = {}
        for name in ("open_store", "open_target_of", "replicate"):
            patch.setattr(work, name, self._watched(name, getattr(work, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that notes what it is given, and is made without keys and engines."""

        def watched(*args: Any, **words: Any) -> Any:  # noqa: ANN401
            if name == "replicate":
                self.said["rate"] = args[3].bytes_per_s
                self.said["engine"] = (words.pop("executor"), words.pop("workers"))
                self.said["check"] = args[3].check
                return call(*args, executor="threads", workers=None)
            given = {key: words.get(key) for key in ("single_writer", "region", "workers")}
            self.said[name] = {**given, "key": words.pop("encryption_key", None)}
            return call(*args, **words)

        return watched

    def objects(self) -> list[dict[str, Any]]:
        return [*(dict(space.objects) for space in self.spaces.values()), dict(_shelf.classes)]

    def job(self, text: str) -> Job:
        """Read a job file; ``[source]`` and ``[target]`` in the text add to those tables."""
        places = ""
        for table, name in (("source", "hot"), ("target", "cold")):
            head, _, rest = text.partition(f"[{table}]\n")
            own, mark, more = rest.partition("\n[")
            text = head + mark[1:] + more
            places += f'[{table}]\nurl = "cold://{self.spaces[name]._space_name}"\n{own}\n'
        top = "".join(line for line in text.splitlines(True) if line.startswith("name"))
        file = self.folder / "nightly.toml"
        file.write_text(top + places + text.removeprefix(top))
        return read_job(file)

    def outcome(self, text: str) -> dict[str, Any]:
        """Run a job, dry first; return what became of everything."""
        job, before = self.job(text), self.objects()
        foretold = run_job(job, dry_run=True)
        assert self.objects() == before
        report = run_job(job)
        assert _figures(report) == _figures(foretold)
        found: dict[str, Any] = {
            "name": report.name,
            "steps": [step.name for step in report.steps],
            "exit": report.exit_code,
            "overdue": {late.step for late in report.overdue},
            **self.said,
        }
        for name, space in self.spaces.items():
            with ckptstore.open(f"cold://{space._space_name}") as store:
                versions = store.versions()
                packs = {one.step: _packs(store, one) for one in versions if one.level == "full"}
                found |= {
                    f"{name} has": {one.step: one.level for one in versions},
                    f"{name} pins": {one.step for one in versions if one.pinned},
                    f"{name} notes": {one.step for one in versions if one.replicas},
                    f"{name} lost": {
                        problem.step for problem in store.verify().problems if problem.step
                    },
                    f"{name} condemned": len(store.repo.catalog.condemned),
                    f"{name} packs": len(list(space.list("packs/"))),
                }
                if name == "cold":
                    found["classes"] = {
                        step: {_shelf.classes[key] for key in keys if key in _shelf.classes}
                        for step, keys in packs.items()
                        if any(key in _shelf.classes for key in keys)
                    }
        return found


def _figures(report: JobReport) -> list[tuple[str, dict[str, Any] | None]]:
    """Return the steps, with what a dry run foretells: a target's come after the copy."""
    names = ("selected", "copied", "present", "chunks", "evicted", "pinned", "changes")
    found = {one.name: {name: one.result.get(name) for name in names} for one in report.steps}
    return [
        (name, None if name[:5] == "scrub" or "target" in name else found[name]) for name in found
    ]


@pytest.fixture
def worlds(
    trained: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], World]:
    """Return a function that makes stores of this test alone."""
    return lambda: World(trained, tmp_path, monkeypatch)


_OPEN = {"single_writer": False, "region": None, "workers": 2, "key": None}
_MADE = {**_OPEN, "workers": None}
_FULL = dict.fromkeys((1, 2, 3, 4, 5, 9), "full")
_OLDER = '[select]\nolder_than = "1d"\n'
_EVICT = '[retain]\nevict = "last 2"\n'
_ARCHIVE = '[archive]\nclass = "GLACIER"\n'
_DASK = '[copy]\nengine = "dask://h:1"\n'
_GC = "[gc]\nsource = true\ntarget = true\n"
_COLD = {"GLACIER"}


def _copied(*steps: int, records: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return what changes where only these versions are copied, and these records."""
    has = {step: _FULL[step] for step in (1, 2, *steps)} | dict.fromkeys(records, "record")
    return {"cold has": has, "hot notes": {1, *steps}, "cold packs": 4 + len(steps)}


KEYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "name": ("", 'name = "weekly"\n', {"name": "weekly"}),
    "source.options": (
        "", '[source]\noptions = {region = "x"}\n', {"open_store": _OPEN | {"region": "x"}},
    ),
    "target.options": (
        "", '[target]\noptions = {region = "x"}\n', {"open_target_of": _MADE | {"region": "x"}},
    ),
    "source.single_writer": (
        "", "[source]\nsingle_writer = true\n", {"open_store": _OPEN | {"single_writer": True}},
    ),
    "target.single_writer": (
        "", "[target]\nsingle_writer = true\n", {"open_target_of": _MADE | {"single_writer": True}},
    ),
    "source.key": ("", '[source]\nkey = "env:X"\n', {"open_store": _OPEN | {"key": "env:X"}}),
    "target.key": ("", '[target]\nkey = "env:X"\n', {"open_target_of": _MADE | {"key": "env:X"}}),
    "select.refs": ("", '[select]\nrefs = ["gpt@3"]\n', _copied(3)),
    "select.runs": ("", '[select]\nruns = ["gpt"]\n', _copied(3, 4, 5)),
    "select.keep": ("", '[select]\nkeep = "last 1"\n', _copied(5, 9, records=(3, 4))),
    "select.older_than": ("", _OLDER, _copied()),
    "select.since": ("", '[select]\nsince = "1h"\n', _copied(5, 9, records=(3, 4))),
    "copy.check": ("", "[copy]\ncheck = false\n", {"check": False, "hot notes": {1}}),
    "copy.rate": ("", '[copy]\nrate = "1GiB"\n', {"rate": float(1 << 30)}),
    "copy.workers": ("", "[copy]\nworkers = 3\n", {"open_store": _OPEN | {"workers": 3}}),
    "copy.engine": ("", _DASK, {"engine": ("dask://h:1", None)}),
    "copy.tasks": (_DASK, _DASK + "tasks = 3\n", {"engine": ("dask://h:1", 3)}),
    "retain.source": (
        "",
        '[retain]\nsource = {full = "last 1"}\n',  # 2 was never read back there
        {
            "steps": ["replicate", "retain-source"],
            "hot has": dict.fromkeys((2, 3, 5, 9), "full"),  # with the tagged one
            "hot notes": {3, 5, 9},
            "hot lost": set(),
        },
    ),
    "retain.target": (
        "",
        '[retain]\ntarget = {full = "last 1"}\n',
        {
            "steps": ["replicate", "retain-target"],
            "cold has": {3: "full", 5: "full", 9: "full"},
            "cold lost": set(),
        },
    ),
    "retain.evict": (
        "",
        _EVICT,  # 2 was never read back there
        {
            "steps": ["replicate", "evict"],
            "hot has": {**_FULL, 1: "record"},
            "hot lost": set(),
            "hot condemned": 3,
            "cold pins": {1},
        },
    ),
    "retain.pin_evicted": (_EVICT, _EVICT + "pin_evicted = false\n", {"cold pins": set()}),
    "gc.source": (
        "", "[gc]\nsource = true\n", {"steps": ["replicate", "gc-source"], "hot condemned": 4},
    ),
    "gc.target": (
        "", "[gc]\ntarget = true\n", {"steps": ["replicate", "gc-target"], "cold condemned": 4},
    ),
    "gc.grace": (
        _GC,
        _GC + 'grace = "10m"\n',
        {"hot condemned": 2, "hot packs": 7, "cold condemned": 2, "cold packs": 7},
    ),
    "scrub.source": (
        "",
        "[scrub]\nsource = 1.0\n",
        {
            "steps": ["scrub-source", "replicate"],
            "hot lost": set(),
            "hot condemned": 3,  # the damaged pack
            "hot packs": 9,
        },
    ),
    "scrub.target": (
        "",
        "[scrub]\ntarget = 1.0\n",
        {
            "steps": ["replicate", "scrub-target"],
            "cold lost": set(),
            "cold condemned": 3,
            "cold packs": 9,
        },
    ),
    "alert.not_replicated_after": (
        _OLDER,
        _OLDER + '[alert]\nnot_replicated_after = "1h"\n',
        {"exit": 7, "overdue": {3, 4}},
    ),
    "archive.class": (
        "",
        _ARCHIVE,  # neither the heads nor 2, which was never read back
        {"steps": ["replicate", "archive-target"], "classes": {1: _COLD, 3: _COLD, 4: _COLD}},
    ),
    "archive.min_age": (_ARCHIVE, _ARCHIVE + 'min_age = "1d"\n', {"classes": {1: _COLD}}),
    "archive.keep_hot": (
        _ARCHIVE, _ARCHIVE + 'keep_hot = "tagged"\n', {"classes": {1: _COLD, 4: _COLD}},
    ),
}  # fmt: skip
"""Key to a job, the same with the key, and what that changes."""


def _keys(kind: type[msgspec.Struct], above: str = "") -> Iterator[str]:
    for one in msgspec.structs.fields(kind):
        tables = [t for t in get_args(one.type) or (one.type,) if isclass(t)]
        inner = [t for t in tables if issubclass(t, msgspec.Struct)]
        yield from _keys(inner[0], f"{one.encode_name}.") if inner else [above + one.encode_name]


def test_every_key_has_its_row() -> None:
    """A key that is added to job files needs a row; locations are in all of them."""
    assert set(KEYS) == set(_keys(Job)) - {"source.url", "target.url"}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_what_it_says(worlds: Callable[[], World], key: str) -> None:
    """What else a job does and what it leaves alone is the same with and without the key."""
    base, text, changes = KEYS[key]
    assert worlds().outcome(text) == worlds().outcome(base) | changes


_COLD_ONE = {"kind": errors.ColdObjectError.kind}
_LOST_ONE = {"kind": errors.CorruptObjectError.kind}


@pytest.mark.parametrize(
    ("results", "late", "code"),
    [
        ([{}], False, 0),
        ([{}], True, errors.PolicyError.exit_code),
        ([{"failures": [_LOST_ONE]}], False, errors.IntegrityError.exit_code),
        ([{"failures": [_COLD_ONE, _COLD_ONE]}], True, errors.ColdObjectError.exit_code),
        ([{"failures": [_COLD_ONE, _LOST_ONE]}], False, errors.IntegrityError.exit_code),
        ([{"skipped": [{}], "failures": []}], False, errors.PolicyError.exit_code),
        ([{"missed": 0, "note_failure": ""}], False, 0),
        ([{"missed": 2}], True, errors.IntegrityError.exit_code),
        ([{"note_failure": "full"}], True, errors.StorageError.exit_code),
        ([{}, {"failures": [_LOST_ONE]}, {"skipped": [{}]}], True, errors.IntegrityError.exit_code),
    ],
)
def test_exit_codes(results: list[dict[str, Any]], late: bool, code: int) -> None:
    """That of the first step that failed counts, and lateness only where none did."""
    steps = []
    for result in results:
        error, exit_code = problem_of(result)
        steps.append(
            StepReport(
                name="replicate", ok=not error, seconds=0.0, result=result, error=error,
                exit_code=exit_code,
            )
        )  # fmt: skip
    overdue = (Overdue(version="a" * 32, run="gpt", step=1, age_s=9.0),) if late else ()
    texts = dict.fromkeys(
        ("name", "source", "target", "target_id", "began_at", "covered_until"), ""
    )
    report = JobReport(**texts, dry_run=False, seconds=1.0, steps=tuple(steps), overdue=overdue)
    assert (report.exit_code, report.ok) == (code, code == 0)


@pytest.mark.parametrize(
    "kind", [errors.StorageError, errors.CorruptObjectError, errors.PolicyError]
)
def test_a_step_that_raises_gives_its_code(
    worlds: Callable[[], World], monkeypatch: pytest.MonkeyPatch, kind: type[errors.CkptStoreError]
) -> None:
    """What depends on the copy is left out; collections come all the same."""

    def failing(*_: object, **__: object) -> None:
        raise kind("no")

    world = worlds()
    monkeypatch.setattr(work, "replicate", failing)
    report = run_job(world.job(_EVICT + 'source = {full = "last 1"}\n' + _GC))
    assert [(step.name, step.ok) for step in report.steps] == [
        ("replicate", False),
        ("gc-target", True),
        ("gc-source", True),
    ]
    assert report.exit_code == kind.exit_code


_MORE = '[archive]\nclass = "GLACIER"\nkeep_hot = "tagged"\n'


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Let locations of the scheme ``cold`` have storage classes, and return what they know."""
    shelf = Shelf()

    def open_cold(url: str, **_options: object) -> ColdBackend:
        return ColdBackend(open_memory(url.replace("cold://", "memory://")), shelf)

    monkeypatch.setattr("coldbackend.open_cold", open_cold, raising=False)
    monkeypatch.setitem(registry.FACTORIES, "cold", "coldbackend:open_cold")
    return shelf


@pytest.fixture
def target() -> str:
    """Return where the target is to be."""
    return f"cold://{uuid.uuid4().hex}"


def _job(tmp_path: Path, target: str, more: str = _MORE) -> Job:
    file = tmp_path / "nightly.toml"
    file.write_text(f'[source]\nurl = "{tmp_path}/hot"\n[target]\nurl = "{target}"\n{more}')
    return read_job(file)


def _train(tmp_path: Path, *steps: int) -> None:
    with ckptstore.open(tmp_path / "hot", create=True) as store:
        run = store.run("gpt")
        for step in steps:
            tags = ["keep"] if step == 2 else ()
            run.save({"w": torch.full((40_000,), float(step))}, step=step, tags=tags)


def _step(report: JobReport) -> dict[str, Any]:
    (found,) = [step for step in report.steps if step.name == "archive-target"]
    return dict(found.result)


def test_what_is_old_in_the_target_gets_cold(tmp_path: Path, shelf: Shelf, target: str) -> None:
    """All but the head and what a rule keeps; a second run has nothing to do."""
    _train(tmp_path, 1, 2, 3, 4)
    job = _job(tmp_path, target)
    report = run_job(job)
    assert report.ok
    found = _step(report)
    assert (found["versions"], found["moved"], found["class"]) == (2, 2, "GLACIER")
    assert found["moved_bytes"] > 0
    assert len(shelf.classes) == 2
    again = _step(run_job(job))
    assert (again["moved"], again["there"]) == (0, 2)
    with ckptstore.open(target) as cold:
        assert cold.verify().cold_packs_count == 2
        assert cold.load("gpt@keep")["w"][0] == 2.0
        assert cold.load("gpt@4")["w"][0] == 4.0


def test_scrubs_and_evictions_go_on_beside_cold_packs(
    tmp_path: Path, shelf: Shelf, target: str
) -> None:
    """A scrub reads what it can, and content leaves the source also of what is cold."""
    _train(tmp_path, 1, 2, 3, 4)
    more = '[retain]\nevict = "last 1"\n[scrub]\ntarget = 1.0\n[gc]\nsource = true\ntarget = true\n'
    job = _job(tmp_path, target, _MORE + more)
    run_job(job)
    _train(tmp_path, 5)
    report = run_job(job)
    assert report.ok, [step.error for step in report.steps]
    assert len(shelf.classes) == 3
    with ckptstore.open(tmp_path / "hot") as hot:
        levels = {version.step: version.level for version in hot.versions()}
        assert levels == {1: "record", 2: "full", 3: "record", 4: "record", 5: "full"}


def test_a_target_without_classes_fails_its_step_alone(tmp_path: Path) -> None:
    """The rest of the job is done, and the exit code tells."""
    _train(tmp_path, 1, 2, 3)
    report = run_job(_job(tmp_path, f"{tmp_path}/cold"))
    (failed,) = [step for step in report.steps if not step.ok]
    assert failed.name == "archive-target"
    assert "no storage classes" in failed.error
    assert report.exit_code == InvalidInputError.exit_code
