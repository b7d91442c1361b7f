"""Keys and credentials show nowhere: everything that a run writes and prints is searched."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from buckets import S3Bucket
from local_servers import SECRET

import ckptstore
from ckptstore import keyring
from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.key_sources import hidden
from ckptstore.backends.sealing import UserKey
from ckptstore.cli.main import COMMANDS
from ckptstore.cli.main import run as run_program
from ckptstore.config import Options
from ckptstore.errors import CkptStoreError
from ckptstore.format.encryption import decode_key_record, encode_key_record
from ckptstore.keyring import open_keys
from ckptstore.repo import open_repo
from ckptstore.store import Store

KEY = bytes(range(33, 65))
NEW = bytes(range(65, 97))


def forms(secret: bytes) -> list[bytes]:
    """Return what a secret may look like, without its first and last bytes."""
    texts = [secret, secret.hex().encode(), secret.hex().upper().encode(), repr(secret).encode()]
    texts += [
        base64.b64encode(secret),
        base64.urlsafe_b64encode(secret),
        str(list(secret)).encode(),
    ]
    texts.append(json.dumps(secret.decode("latin-1")).encode())
    return [text[4:-4] for text in texts]


def data_key(place: Path, key: bytes) -> bytes:
    """Return the data key of a store, the way only a test may."""
    with ckptstore.open(place, encryption_key=key, read_only=True) as store:
        assert isinstance(store.repo.backend, EncryptedBackend)
        return store.repo.backend._key._material


class Program:
    """Runs commands, and keeps all that they print."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.said = ""

    def run(self, *words: str, code: int = 0) -> None:
        """Run one command, which ends as it should."""
        found = run_program(words)
        printed = self._capfd.readouterr()
        self.said += printed.out + printed.err
        assert found == code, printed.err


@pytest.fixture
def program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Program:
    """Return the program in a folder below two key files, which are not searched."""
    for name, material in (("one.key", KEY), ("two.key", NEW)):
        (tmp_path / name).write_bytes(material.hex().encode())
        (tmp_path / name).chmod(0o600)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("KEY_OF_TEST", KEY.hex())
    return Program(capfd)


def searched(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield all files that a run left."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()


def test_keys_show_nowhere_in_a_run(program: Program, tmp_path: Path) -> None:
    """Commands, documents, errors, reports, metrics, stores, states of checks: no form of a key."""
    work = tmp_path / "work"
    program.run("init", "s", "--key", "file:../one.key")
    with ckptstore.open(work / "s", encryption_key=KEY) as store:
        for step in (1, 2, 3):
            store.run("r", metrics={"loss": "min"}).save(
                {"x": b"y" * 300_000, "step": step}, step=step, metrics={"loss": 1.0}
            )
        store.run("r").save_async({"x": b"z" * 100_000}, step=4).result()
    secret = data_key(work / "s", KEY)
    at = ("-s", "s", "--key", "env:KEY_OF_TEST")
    for words in (
        ("ls",), ("ls", "--json"), ("show", "r@1", "--json"), ("log", "--json"), ("du",),
        ("stats", "--json"), ("verify", "--record", "--json"), ("gc", "--json"),
        ("fork", "r@2", "f", "--json"), ("rollback", "r", "2"), ("repair", "--json"),
        ("replicate", "--to", "t", "--to-key", "file:../two.key", "--json"),
    ):  # fmt: skip
        code = 2 if words[0] == "rollback" else 0
        program.run(*words, *at, code=code)
    program.run("ls", "-s", "s", code=2)
    program.run("ls", "-s", "s", "--key", "file:../two.key", "--json", code=2)
    program.run("ls", "-s", "s", "--key", KEY.hex(), "--json", code=2)
    program.run("key", "id", "--key", "file:../one.key", "--json")
    program.run("key", "new", "made.key", "--json")
    made = (work / "made.key").read_bytes().strip()
    (work / "made.key").unlink()
    (work / "job.toml").write_text(
        '[source]\nurl = "s"\nkey = "env:KEY_OF_TEST"\n[target]\nurl = "u"\n'
        'key = "command:cat ../two.key"\n[scrub]\nsource = 1.0\n'
    )
    program.run("archive", "--job", "job.toml", "--report", "report.json", "--metrics", "m.prom")
    (pack, *_) = sorted((work / "s").glob("packs/*/*.pack"))
    data = pack.read_bytes()
    pack.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    program.run("verify", *at, "--json", code=5)
    rotated = ("-s", "s", "--key", "env:KEY_OF_TEST", "--new-key", "file:../two.key")
    program.run("key", "rotate", *rotated, "--json")
    everything = [("the output", program.said.encode()), *searched(work)]
    for material in (KEY, NEW, secret, bytes.fromhex(made.decode())):
        for form in forms(material):
            # A wrong variable is named, which is where somebody may put a key by mistake.
            hits = [where for where, data in everything if form in data.replace(b"env:", b"")]
            allowed = (
                {"the output"} if material == KEY and form == KEY.hex().encode()[4:-4] else set()
            )
            assert set(hits) <= allowed, form


def test_keys_show_in_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors of every kind, as they are printed, pickled and logged."""
    with ckptstore.open(tmp_path / "s", create=True, encryption_key=KEY) as store:
        store.run("r").save({"x": b"y" * 300_000}, step=1)
        texts = [repr(store), repr(store.repo.backend), repr(store.info), str(store.info)]
    secret = data_key(tmp_path / "s", KEY)
    (pack,) = tmp_path.glob("s/packs/*/*.pack")
    data = pack.read_bytes()
    pack.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def attempts(store: Store) -> Iterator[object]:
        yield lambda: store.load("r@1")
        yield lambda: store.replicate(tmp_path / "t")
        yield lambda: store.repair(tmp_path / "t", source_key=NEW)
        yield lambda: ckptstore.open(tmp_path / "s", encryption_key=NEW)
        yield lambda: ckptstore.open(tmp_path / "s", encryption_key=KEY[:-1])
        yield lambda: ckptstore.open(tmp_path / "s", encryption_key=KEY.hex())
        yield lambda: ckptstore.open(tmp_path / "no", encryption_key=KEY)
        yield lambda: pickle.dumps(ckptstore.open)

    with (
        caplog.at_level(logging.DEBUG),
        ckptstore.open(tmp_path / "s", encryption_key=KEY) as store,
    ):
        for attempt in attempts(store):
            try:
                attempt()  # type: ignore[operator]
            except CkptStoreError as error:
                texts += traceback.format_exception(error)
                texts += [str(error), repr(error), repr(pickle.dumps(error))]
    assert len(texts) > 20
    everything = "\n".join([*texts, caplog.text]).encode()
    for material in (KEY, NEW, secret):
        assert not [form for form in forms(material) if form in everything]


class Locals:
    """Collects what tools that print the local variables of every frame would print."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, str]] = []

    def of(self, attempt: Callable[[], object]) -> None:
        """Let an attempt fail, and keep the variables of all frames but this file's."""
        with pytest.raises(CkptStoreError) as caught:
            attempt()
        left: list[BaseException | None] = [caught.value]
        while left:
            if (error := left.pop()) is None:
                continue
            told = traceback.TracebackException.from_exception(error, capture_locals=True)
            for frame in told.stack:
                if frame.filename != __file__:
                    where = f"{type(error).__name__} in {frame.name}"
                    self.frames.append((where, repr(frame.locals)))
            left += [error.__cause__, error.__context__]


@pytest.mark.parametrize("given", ["bytes", "file"])
def test_keys_show_in_no_local_variable(tmp_path: Path, given: str) -> None:
    """No frame of ours holds the bytes of a user's key or of a data key while an error passes."""
    one: bytes | str
    two: bytes | str
    one, two = KEY, NEW
    if given == "file":
        for name, material in (("one", KEY), ("two", NEW)):
            (tmp_path / name).write_bytes(material.hex().encode())
            (tmp_path / name).chmod(0o600)
        one, two = (f"file:{tmp_path}/{name}" for name in ("one", "two"))
    place = tmp_path / "s"
    with ckptstore.open(place, create=True, encryption_key=one) as store:
        store.run("r").save({"x": b"y" * 300_000}, step=1)
    secret = data_key(place, KEY)
    (pack,) = place.glob("packs/*/*.pack")
    data = pack.read_bytes()
    pack.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    seen = Locals()
    with ckptstore.open(place, encryption_key=one) as store:
        seen.of(lambda: store.load("r@1"))
        seen.of(lambda: store.replicate(store, to_key=two))
        seen.of(lambda: store.repair(tmp_path / "no", source_key=two))
    seen.of(lambda: ckptstore.open(place, encryption_key=two))
    seen.of(lambda: ckptstore.rotate_key(place, encryption_key=two, new_key=one))
    seen.of(lambda: ckptstore.mend_keys(place, encryption_key=two))
    superblock = (place / "store.json").read_bytes()
    (place / "store.json").unlink()
    seen.of(lambda: ckptstore.mend_superblock(place, encryption_key=two))
    (place / "store.json").write_bytes(superblock)
    seen.of(lambda: open_repo(str(place), create=True, key=two))
    (record,) = (place / "keys").iterdir()
    lie = decode_key_record(record.read_bytes(), where="here")
    lie = msgspec.structs.replace(lie, seal="00" * 32)
    record.write_bytes(encode_key_record(lie))
    seen.of(lambda: ckptstore.open(place, encryption_key=one))

    assert {"CorruptTensorError in load", "WrongKeyError in open_store"} <= {
        where for where, _ in seen.frames
    }
    assert "CorruptObjectError in unwrap" in {where for where, _ in seen.frames}
    for material in (KEY, NEW, secret):
        # A variable is printed by its repr, and here once more by that of the dict that holds it.
        whole = [*forms(material), *(repr(form)[2:-1].encode() for form in forms(material))]
        hits = {where for where, told in seen.frames for form in whole if form in told.encode()}
        assert not hits


@pytest.mark.parametrize("material", [b"short", bytes(32)], ids=["short", "zeros"])
def test_a_key_that_is_refused_has_a_repr(material: bytes) -> None:
    """Whatever prints the variables of the frame that refuses it finds one, which shows nothing."""
    seen = Locals()
    seen.of(lambda: UserKey(material))
    assert any("<key >" in told for _, told in seen.frames)


def test_keys_show_in_no_repr(tmp_path: Path) -> None:
    """Keys, whatever holds one, and pickled or formatted forms of it: names of keys at most."""
    with ckptstore.open(tmp_path / "s", create=True, encryption_key=KEY) as store:
        backend = store.repo.backend
        assert isinstance(backend, EncryptedBackend)
        store.run("r").save({"x": b"y" * 300_000}, step=1)
        writer = backend.open_writer("packs/aa/one.pack")
        sealer = backend._key.sealer("a", bytes(32))
        user_key = UserKey(KEY)
        record, opened = open_keys(backend.inner, user_key)
        holders = [
            user_key, backend._key, opened, sealer, backend, writer, record, store, store.repo,
            store.repo.superblock, store.info, store.repo.options, Options(), hidden(KEY),
            {"key": opened}, [user_key], rotated(store),
        ]  # fmt: skip
        texts = [form(each) for each in holders for form in (repr, str, "{!r}".format)]
        # Python's own repr of an object names its class alone: look into its attributes too.
        texts += [repr(vars(each)) for each in (backend, writer, store, store.repo)]
        writer.abort()
    secret = data_key(tmp_path / "s", KEY)
    everything = "\n".join(texts).encode()
    assert repr(opened) == "<data key>"
    assert repr(user_key) == f"<key {user_key.id}>"
    for material in (KEY, NEW, secret):
        assert not [form for form in forms(material) if form in everything]


def rotated(store: Store) -> object:
    """Return what a rotation of the key reports, which is undone again."""
    old, new = UserKey(KEY), UserKey(NEW)
    backend = store.repo.backend
    assert isinstance(backend, EncryptedBackend)
    keyring.rotate(backend, old, new, keep_old=False, conditional=True)
    return keyring.rotate(backend, new, old, keep_old=False, conditional=True)


@pytest.mark.slow
def test_credentials_of_storage_options_show_nowhere(
    s3_bucket: S3Bucket,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Options for the storage library are in no object, log, error, report or output."""
    options = s3_bucket.options()
    texts: list[str] = []
    with caplog.at_level(logging.INFO, "ckptstore"):
        with ckptstore.open(s3_bucket.url, create=True, **options) as store:
            run = store.run("r", metrics={"loss": "min"})
            run.save({"x": b"y" * 300_000}, step=1, metrics={"loss": 1.0})
            run.save_async({"x": b"z" * 300_000}, step=2).result()
            texts += [repr(store), repr(store.repo.backend), repr(store.info)]
            texts += [repr(store.verify(record=True)), repr(store.gc()), repr(store.log())]
            with ckptstore.open(tmp_path / "t", create=True) as target:
                texts += [repr(store.replicate(target)), repr(target.log())]
                texts += [repr(target.replicate(store))]
            for include in (None, ["no"]):
                with pytest.raises(CkptStoreError) as caught:
                    store.load("r@9" if include is None else "r@1", include=include)
                texts += [*traceback.format_exception(caught.value)]
        wrong = {**options, "secret": f"not-{SECRET}-at-all"}
        with pytest.raises(CkptStoreError) as refused:
            ckptstore.open(s3_bucket.url + "-not-there", **wrong)
        texts += [*traceback.format_exception(refused.value), repr(pickle.dumps(refused.value))]
    words = [f"{name}={value}" for name, value in options.items() if isinstance(value, str)]
    given = [part for word in words for part in ("--option", word)]
    for command in ("ls", "stats", "verify", "doctor"):
        run_program([command, "--store", s3_bucket.url, *given, "--json"])
    run_program(["ls", "--store", s3_bucket.url + "x", *given])
    run_program(["ls", "--store", s3_bucket.url, *given, "--option", f"bad:={SECRET}"])
    printed = capfd.readouterr()
    everything = "\n".join([*texts, caplog.text, printed.out, printed.err]).encode()
    stored = [s3_bucket.read(key) or b"" for key in sorted(s3_bucket.keys())]
    stored += [data for _, data in searched(tmp_path)]
    assert SECRET in json.dumps(options)
    for form in (SECRET.encode(), base64.b64encode(SECRET.encode())[4:-4]):
        assert form not in everything
        assert not any(form in data for data in stored)


def test_the_command_that_handles_keys_is_there() -> None:
    """The list of commands that is searched above knows it."""
    assert "key" in COMMANDS
