"""Published stores, through a real web server: whole, restricted, encrypted, beside writers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import zstandard
from faultkit.states import differences, state_of
from faultkit.stores import create, memory_with, reopen
from webserver import Reply, Request, WebServer

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends.posix import PosixBackend
from ckptstore.format.keys import PAGE_KEY, PUBLISHED_KEY, pack_key
from ckptstore.format.published import decode_published
from ckptstore.maintenance.replicas.replicate import ReplicateReport
from ckptstore.store import Store
from ckptstore.testing.faulty import WRITES, Fault, FaultyBackend

KEY = bytes(range(32))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a store of a public run, and a secret one that it was forked from."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        secret = store.run("secret-base")
        for step in (1, 2):
            state = {"base": torch.full((50_000,), 1.0), "own": torch.full((50_000,), step * 1.5)}
            secret.save(state, step=step, metrics={"secret": 0.5}, tags=[f"secret-{step}"])
        open_run = store.fork("secret-base@2", "open", metrics={"acc": "max"})
        for step in (3, 4, 5):
            state = {"base": torch.full((50_000,), 1.0), "own": torch.full((50_000,), step * 1.5)}
            open_run.save(state, step=step, metrics={"acc": step / 10}, tags=[f"tag-{step}"])
    return tmp_path / "store"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    """Return a server of the folder that holds the stores."""
    with WebServer(tmp_path) as made:
        yield made


def everything_in(folder: Path) -> bytes:
    """Return all names and bytes below a folder, records decompressed too."""
    found = []
    for path in sorted(folder.rglob("*")):
        found.append(str(path.relative_to(folder)).encode())
        if path.is_file():
            data = path.read_bytes()
            found.append(data)
            start = data.find(b"\x28\xb5\x2f\xfd")
            if start >= 0:
                reader = zstandard.ZstdDecompressor().stream_reader(data[start:])
                found.append(reader.read())
    return b"\0".join(found)


def test_a_published_store_is_read(place: Path, server: WebServer) -> None:
    """A store that was published in its place loads by its URL, also by that of its page."""
    with ckptstore.open(place) as store:
        report = store.publish()
        assert (report.versions_count, report.runs_count, report.copy) == (6, 2, None)
    for end in ("", "/", "/index.html"):
        with ckptstore.open(f"{server.url}/store{end}") as web:
            assert [run.name for run in web.runs()] == ["secret-base", "open"]
            assert web.load("open@5")["own"][7] == 7.5
            assert web.version("open@best:acc")["own"][10:12].tolist() == [7.5, 7.5]
            assert list(web.load("open@3", include=["own"])) == ["own"]
            assert web.verify(["open@5"]).ok


def test_an_unpublished_store_is_read(place: Path, server: WebServer) -> None:
    """A folder that was never published loads too."""
    with ckptstore.open(f"{server.url}/store") as web:
        assert len(web.versions()) == 6
        assert web.load("secret-base@1")["own"][0] == 1.5


@pytest.mark.parametrize("refs", [["open@3", "open@5"], ["open@4"]])
def test_a_restricted_copy_has_nothing_else(
    place: Path, tmp_path: Path, server: WebServer, refs: list[str]
) -> None:
    """It has the versions that were named; no name, id, metric, tag or byte of the others."""
    with ckptstore.open(place) as store:
        store.publish(tmp_path / "public", refs)
        chosen = [store.resolve(ref) for ref in refs]
        others = [one for one in store.versions() if one not in chosen]
        ids = [name for one in others for name in (one.id, one.manifest_key[-40:])]
        private = [torch.full((50_000,), one.step * 1.5).numpy().tobytes()[:64] for one in others]
    found = everything_in(tmp_path / "public")
    assert b"secret" not in found
    assert not [name for name in ids if name.encode() in found]
    assert not [one.tags for one in others if one.tags and one.tags[0].encode() in found]
    assert not [data for data in private if data in found]
    with ckptstore.open(f"{server.url}/public") as web:
        assert [one.id for one in web.versions()] == [one.id for one in chosen]
        assert web.versions()[0].parent == ""
        assert [run.origin for run in web.runs()] == [""]
        last = web.load("open@latest")
        assert last["own"][0] == chosen[-1].step * 1.5
        assert last["base"][0] == 1.0


@pytest.mark.parametrize("codec", ["raw", "delta"])
def test_a_restricted_copy_has_no_neighbours_of_its_pieces(tmp_path: Path, codec: str) -> None:
    """Small tensors share chunks, and deltas refer to others: neither travels, and all is read."""
    generator = torch.Generator().manual_seed(3)
    small = {f"b{one}": torch.randn(256, generator=generator) for one in range(20)}
    large = torch.randn(1 << 18, generator=generator)
    later = {name: tensor + 1 for name, tensor in small.items()} | {"b7": small["b7"]}
    changed = large + 1e-6 * torch.randn(1 << 18, generator=generator)
    with ckptstore.open(tmp_path / "store", create=True) as store:
        run = store.run("gpt")
        run.save({**small, "large": large}, step=1, codec=codec)
        run.save({**later, "large": changed}, step=2, codec=codec)
        store.publish(tmp_path / "public", refs=["gpt@2"])
        before = store.repo.manifests.load(store.version("gpt@1").info)
    with ckptstore.open(tmp_path / "public") as copy:
        assert not differences(copy.load("gpt@2"), {**later, "large": changed})
        assert copy.verify().ok
        pieces = copy.repo.manifests.load(copy.version("gpt@2").info).pieces
        assert pieces.base is None
        ours = {one.tobytes() for one in pieces.ids}
        strangers = {one.tobytes() for one in before.pieces.ids} - ours
        assert len(strangers) == 20
        for pack in pieces.packs:
            size = copy.repo.backend.stat(pack_key(pack)).size_bytes
            data = copy.repo.backend.get(pack_key(pack), bytes_max=size)
            assert not any(one in data for one in strangers)
            if codec == "raw":
                texts = [small[name].numpy().tobytes() for name in small if name != "b7"]
                assert not any(text in data for text in texts)


def test_a_copy_keeps_lineage_among_its_versions(place: Path, tmp_path: Path) -> None:
    """The parent of a version is the nearest ancestor that was chosen too; heads follow."""
    with ckptstore.open(place) as store:
        store.publish(tmp_path / "public", ["secret-base@1", "open@3", "open@5"])
    with ckptstore.open(tmp_path / "public") as public:
        one, three, five = public.versions()
        assert (one.parent, three.parent, five.parent) == ("", one.id, three.id)
        public.replicate(tmp_path / "again")
    with ckptstore.open(tmp_path / "again") as again:
        assert again.resolve("open@latest").step == 5


def test_a_replica_by_its_url(place: Path, tmp_path: Path, server: WebServer) -> None:
    """A published store can be the replica of a local one: loads turn to it, and bring back."""
    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        with ckptstore.open(f"{server.url}/store") as web:
            web.replicate(hot, ["open@5"])
        assert hot.resolve("open@3").level == "record"
        hot.add_replica("web", f"{server.url}/store")
        assert hot.load("open@3")["own"][0] == 4.5
        hot.load("open@3", refill=True)
        assert hot.resolve("open@3").level == "full"
        assert hot.evict(["open@3"], replica="web").evicted == ()
        assert hot.resolve("open@3").level == "full"


def copied(store: Store, public: Path) -> ReplicateReport:
    """Publish the whole store as a copy; return what came."""
    report = store.publish(public).copy
    assert report is not None
    return report


def test_publishing_again_adds(place: Path, tmp_path: Path, server: WebServer) -> None:
    """A repetition copies new versions only; an open reader sees them."""
    public = tmp_path / "public"
    with ckptstore.open(place) as store:
        assert len(copied(store, public).copied) == 6
        web = ckptstore.open(f"{server.url}/public")
        assert len(web.versions()) == 6
        report = copied(store, public)
        assert (report.copied, len(report.present), report.chunks_count) == ((), 6, 0)
        state = {"base": torch.full((50_000,), 1.0), "own": torch.full((50_000,), 9.0)}
        store.run("open").save(state, step=6)
        report = copied(store, public)
        assert (len(report.copied), report.chunks_count) == (1, 1)
        assert web.load("open@6")["own"][0] == 9.0
        web.close()


def test_a_narrower_copy_is_refused(place: Path, tmp_path: Path) -> None:
    """Where a copy shows versions that are not chosen now, it is refused, unless they may stay."""
    public = tmp_path / "public"
    with ckptstore.open(place) as store:
        store.publish(public, ["open@3"])
        before = everything_in(public)
        with pytest.raises(errors.PolicyError, match=r"besides: open@3.*--add"):
            store.publish(public, ["open@4"])
        assert everything_in(public) == before
        assert store.publish(public, ["open@4"], add=True).versions_count == 2
        gone = store.resolve("open@4").id
        store.remove(["open@4"], force=True)
        with pytest.raises(errors.PolicyError, match="besides: open@4"):
            store.publish(public, ["open@3"])
        assert store.publish(public).deleted == (gone,)
        with ckptstore.open(public) as copy:
            copy.remove([f"#{gone}"], force=True)
        assert store.publish(public).deleted == ()
        with pytest.raises(errors.VersionNotFoundError):
            store.publish(tmp_path / "none", ["open@44"])
        assert not (tmp_path / "none").exists()
        for wrong in ({"refs": ["open@3"]}, {"add": True}, {"to_key": KEY}):
            with pytest.raises(errors.InvalidInputError, match="are for a copy"):
                store.publish(None, **wrong)
        with pytest.raises(errors.ConflictError, match="one store"):
            store.publish(place)


def test_beside_collections_and_removals(place: Path, server: WebServer) -> None:
    """``gc`` leaves both files alone; a reader with an old index sees what was removed since."""
    with ckptstore.open(place) as store:
        store.publish()
        page = (place / PAGE_KEY).read_bytes()
        store.remove(["open@4"], force=True)
        for _ in range(2):
            store.gc(grace_s=0, orphan_age_s=0)
        assert (place / PAGE_KEY).read_bytes() == page
        assert store.verify().notices == ()
        with ckptstore.open(f"{server.url}/store") as web:
            assert [one.step for one in web.versions("open")] == [2, 3, 5]
            assert web.load("open@5")["own"][0] == 7.5
        store.publish()
        assert b"open@4" not in (place / PAGE_KEY).read_bytes()


def test_beside_writers(place: Path, server: WebServer) -> None:
    """Publications of two processes, saves and collections at once leave an index that is right."""
    failures: list[BaseException] = []

    def work(turn: int) -> None:
        try:
            with ckptstore.open(place) as store:
                for step in range(3):
                    if turn < 2:
                        store.publish()
                    elif turn == 2:
                        store.run("beside").save({"w": torch.full((9,), 1.0 * step)}, step=step)
                    else:
                        store.gc(grace_s=0, orphan_age_s=0)
        except errors.ConflictError:
            return  # the other one published
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    with ckptstore.open(f"{server.url}/store") as web:
        while any(thread.is_alive() for thread in threads):
            web.versions()
    for thread in threads:
        thread.join()
    assert not failures
    with ckptstore.open(f"{server.url}/store") as web:
        assert web.load("beside@2")["w"][0] == 2.0
    with ckptstore.open(place) as store:
        store.publish()
        index = decode_published((place / PUBLISHED_KEY).read_bytes(), where=PUBLISHED_KEY)
        assert index.commits == store.repo.catalog.number


def test_an_index_that_another_publication_takes_away_is_written(place: Path) -> None:
    """It was there when this one wrote, and gone when it looked whose it was."""
    with ckptstore.open(place) as store:
        store.publish()
        store.run("open").save({"own": torch.zeros(1)}, step=6)
        get: Callable[..., bytes] = PosixBackend.get
        taken: list[str] = []

        def take_away(backend: PosixBackend, key: str, *, bytes_max: int) -> bytes:
            """Delete the index before it is read the first time."""
            if key == PUBLISHED_KEY and not taken:
                taken.append(key)
                backend.delete(key)
            return get(backend, key, bytes_max=bytes_max)

        with patch.object(PosixBackend, "get", take_away):
            store.publish()
        index = decode_published((place / PUBLISHED_KEY).read_bytes(), where=PUBLISHED_KEY)
        assert (taken, index.commits) == ([PUBLISHED_KEY], store.repo.catalog.number)


def test_a_publication_that_fails_anywhere(tmp_path: Path) -> None:
    """Each failed write raises, and leaves a store that reads as before; the next one succeeds."""
    backend = memory_with({})
    store = create(backend)
    for step in (1, 2, 3, 4):
        store.run("gpt").save({"w": [float(step)]}, step=step)
    store.publish()
    store.run("gpt").save({"w": [5.0]}, step=5)
    for at in range(1, 20):
        fault = Fault(calls=WRITES | {"delete"}, at=at)
        with reopen(FaultyBackend(backend, fault)) as faulty:
            try:
                faulty.publish()
            except errors.CkptStoreError as error:
                assert isinstance(error, errors.StorageError)  # noqa: PT017
        assert len(reopen(backend).versions()) == 5
        if not fault.hits:
            break
    else:
        pytest.fail("no publication came through")
    store.publish()
    assert {PAGE_KEY, PUBLISHED_KEY} <= set(backend.objects)


def test_an_encrypted_store(tmp_path: Path, server: WebServer) -> None:
    """It loads with its key; index and page tell nothing but numbers, after a rotation too."""
    place, state = tmp_path / "store", state_of(5)
    with ckptstore.open(place, create=True, encryption_key=KEY) as store:
        store.run("secret-run").save(state, step=1, metrics={"secret-loss": 1.0})
        assert store.publish().versions_count == 1
        with pytest.raises(errors.MissingKeyError):
            store.publish(tmp_path / "plain")
        store.publish(tmp_path / "sealed", to_key=KEY)
    for name in ("store", "sealed"):
        assert b"secret" not in everything_in(tmp_path / name)
        with ckptstore.open(f"{server.url}/{name}", encryption_key=KEY) as web:
            assert not differences(web.load("secret-run@1"), state)
        with pytest.raises(errors.MissingKeyError):
            ckptstore.open(f"{server.url}/{name}")
        with pytest.raises(errors.WrongKeyError):
            ckptstore.open(f"{server.url}/{name}", encryption_key=bytes(range(2, 34)))
    rotated = bytes(range(1, 33))
    ckptstore.store.opening.rotate_key(place, encryption_key=KEY, new_key=rotated)
    with ckptstore.open(f"{server.url}/store", encryption_key=rotated) as web:
        assert len(web.versions()) == 1


class _Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_escapes_names_and_loads_nothing(tmp_path: Path) -> None:
    """Metrics, tags and runs are text, whatever they contain; nothing is fetched or run."""
    attack = "<script>alert('$title')</script>&amp;"
    with ckptstore.open(tmp_path / "store", create=True) as store:
        run = store.run("gpt", metrics={attack: "min"})
        run.save({"w": torch.zeros(3)}, step=7, metrics={attack: 0.25}, tags=["best-one"])
        store.publish()
    page = _Page((tmp_path / "store" / PAGE_KEY).read_text(encoding="utf-8"))
    assert f"{attack} 0.25" in page.text
    assert all(one in page.text for one in ("gpt@7", "best-one", "1 version in 1 run"))
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "a", "form"}
    assert not [attrs for _, attrs in page.tags if {"src", "href", "onload"} & set(attrs)]
    assert 'store.load("gpt@latest")' in page.text


def test_the_page_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the newest versions, and says that there are more."""
    monkeypatch.setattr(limits, "PAGE_VERSIONS_MAX", 2)
    backend = memory_with({})
    store = create(backend)
    for step in (1, 2, 3):
        store.run("gpt").save({"w": [1.0]}, step=step)
    store.publish()
    text = backend.get(PAGE_KEY, bytes_max=10**6).decode()
    assert "gpt@3" in text
    assert "gpt@1" not in text
    assert "The newest 2; ckptstore ls lists all." in text


@pytest.mark.parametrize("kind", ["packs", "manifests", "commits", "snapshots", "store.json"])
def test_a_flipped_byte_is_found(
    place: Path, server: WebServer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that changes one byte of an object is found out; for a snapshot the log is read."""
    with ckptstore.open(place) as store:
        store.publish()

    def flip(request: Request, reply: Reply) -> Reply:
        if f"/{kind}" in request.path and reply.body:
            body = bytearray(reply.body)
            body[len(body) // 2] ^= 4
            return replace(reply, body=bytes(body))
        return reply

    server.change = flip
    if kind == "snapshots":
        with ckptstore.open(f"{server.url}/store") as web:
            assert web.load("open@5")["own"][0] == 7.5
        return
    if kind == "commits":  # none is sound: nothing of the log is read
        with ckptstore.open(f"{server.url}/store") as web, pytest.raises(errors.RunNotFoundError):
            web.load("open@5")
        assert "the end of the log is damaged" in caplog.text
        return
    with (
        pytest.raises(errors.CkptStoreError) as caught,
        ckptstore.open(f"{server.url}/store") as web,
    ):
        web.load("open@5")
    assert caught.value.exit_code in {5, 6}


def test_a_foreign_page_stays(place: Path, tmp_path: Path) -> None:
    """A page that no publication wrote is refused, before anything is written or copied."""
    public = tmp_path / "public"
    public.mkdir()
    for folder in (public, place):
        for page in (b"", b"<!doctype html><p>hand-made" + b" " * 10_000):
            (folder / PAGE_KEY).write_bytes(page)
            before = everything_in(folder)
            with ckptstore.open(place) as store, pytest.raises(errors.PolicyError, match=PAGE_KEY):
                store.publish(None if folder == place else folder)
            assert everything_in(folder) == before
        (folder / PAGE_KEY).unlink()
    with ckptstore.open(place) as store:
        store.publish(public)
        (public / PAGE_KEY).write_bytes(b"mine")
        before = everything_in(public)
        with (
            pytest.raises(errors.PolicyError, match="another location"),
            ckptstore.open(public) as to,
        ):
            store.publish(to)
        assert everything_in(public) == before
