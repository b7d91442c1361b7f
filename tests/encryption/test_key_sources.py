"""Where keys come from, and that nothing of them shows."""

from __future__ import annotations

import base64
import contextlib
import errno
import logging
import os
import pickle
import resource
import select
import sys
from pathlib import Path

import pytest

from ckptstore import limits
from ckptstore.backends.key_sources import make_key_file, read_key
from ckptstore.backends.sealing import UserKey
from ckptstore.errors import EncryptionKeyError, MissingDependencyError

MATERIAL = bytes(range(200, 232))
ID = UserKey(MATERIAL).id
FORMS = {
    "raw": MATERIAL,
    "hex": MATERIAL.hex().encode(),
    "hex and newline": MATERIAL.hex().upper().encode() + b"\n",
    "base64": base64.b64encode(MATERIAL),
    "base64 of URLs": b" " + base64.urlsafe_b64encode(MATERIAL) + b"\r\n",
}
NO_KEYS = {
    "empty": b"", "blanks": b" \n", "short": MATERIAL[:31], "long": MATERIAL + b"x",
    "a passphrase": b"correct horse battery staple 123", "odd hex": MATERIAL.hex()[:-1].encode(),
    "equal bytes": bytes(32), "equal digits": b"0" * 64,
    "too much": b"a" * (limits.KEY_TEXT_BYTES_MAX + 1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_from_everywhere(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, a command, and a variable (which cannot hold any byte) give the same key."""
    path = tmp_path / "key"
    path.write_bytes(FORMS[form])
    path.chmod(0o600)
    assert read_key(f"file:{path}").id == ID
    assert read_key(f"command:cat {path}").id == ID
    if form != "raw":
        monkeypatch.setenv("SECRET_OF_TEST", FORMS[form].decode())
        assert read_key("env:SECRET_OF_TEST").id == ID
    assert read_key(MATERIAL).id == ID


@pytest.mark.parametrize("form", NO_KEYS)
def test_what_is_no_key_is_refused_and_not_repeated(form: str, tmp_path: Path) -> None:
    """The error says where, what a key is, and nothing of what was there."""
    path = tmp_path / "key"
    path.write_bytes(NO_KEYS[form])
    path.chmod(0o600)
    with pytest.raises(EncryptionKeyError) as caught:
        read_key(f"file:{path}")
    text = str(caught.value) + repr(caught.value)
    said = NO_KEYS[form].strip()
    assert len(said) < 5 or (said.decode("latin-1") not in text and said.hex() not in text)


@pytest.mark.parametrize(
    "spec", ["", "file:", "env:", "command:", "nothing", "vault:x", MATERIAL.hex(), "x" * 44]
)
def test_a_text_that_is_no_spec_is_not_repeated(spec: str) -> None:
    """It may be the key itself, given where its place belongs."""
    with pytest.raises(EncryptionKeyError, match="not the place") as caught:
        read_key(spec)
    assert len(spec) < 10 or spec not in str(caught.value)


def test_a_key_file_that_others_can_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is still read: on some file systems modes mean nothing."""
    path = tmp_path / "key"
    path.write_bytes(FORMS["hex"])
    for mode, warned in ((0o600, False), (0o400, False), (0o640, True), (0o644, True)):
        path.chmod(mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ckptstore"):
            assert read_key(f"file:{path}").id == ID
        assert bool(caplog.records) is warned
        assert MATERIAL.hex() not in caplog.text


def test_a_key_may_come_through_a_pipe() -> None:
    """Such as a shell's <(...), which has no mode to warn about."""
    reading, writing = os.pipe()
    os.write(writing, FORMS["hex"])
    os.close(writing)
    assert read_key(f"file:/dev/fd/{reading}").id == ID
    os.close(reading)


@pytest.mark.parametrize("spec", ["file:/no/such/key", "env:NO_SUCH_VARIABLE_OF_TEST"])
def test_what_is_not_there_is_named(spec: str) -> None:
    """The message names the file or the variable."""
    with pytest.raises(EncryptionKeyError, match=spec.partition(":")[2]):
        read_key(spec)


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048, reason="no process has so many files here"
)
def test_a_command_is_run_beside_many_open_files() -> None:
    """Descriptors above 1,023, which select() refuses, as a training with many shards has them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(Path(os.devnull).open("rb")).fileno() < 1024:
            pass
        assert read_key(f"command:printf {MATERIAL.hex()}").id == ID


def test_a_command_is_run_without_a_shell(tmp_path: Path) -> None:
    """What a shell would expand, or run, is an argument like any other."""
    path = tmp_path / "key"
    path.write_bytes(FORMS["hex"])
    with pytest.raises(EncryptionKeyError, match="failed with"):
        read_key(f"command:cat {path}; touch {tmp_path}/ran")
    assert not (tmp_path / "ran").exists()
    assert read_key(f"command:sh -c 'cat {path}; touch {tmp_path}/ran'").id == ID
    assert (tmp_path / "ran").exists()


def test_failing_commands_are_errors_without_their_arguments(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What a command says on stderr is seen; its arguments, which may be secret, are not."""
    run = f"{sys.executable} -c"
    for code, match in (
        ("import sys; print('cannot', file=sys.stderr); sys.exit(3)", "failed with 3"),
        ("print('tok3n')", "no key"),
        ("print('x' * 100_000)", "too long"),
    ):
        with pytest.raises(EncryptionKeyError, match=match) as caught:
            read_key(f'command:{run} "{code}" --token=tok3n')
        assert "tok3n" not in str(caught.value)
    assert "cannot" in capfd.readouterr().err
    for command in ("/no/such/program tok3n", "sh -c 'unclosed tok3n", "   "):
        with pytest.raises(EncryptionKeyError) as caught:
            read_key(f"command:{command}")
        assert "tok3n" not in str(caught.value)


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it holds its output open or has closed it."""
    monkeypatch.setattr(limits, "KEY_COMMAND_S", 0.3)
    for code in ("import time; time.sleep(600)", "import os, time; os.close(1); time.sleep(600)"):
        with pytest.raises(EncryptionKeyError, match="within"):
            read_key(f'command:{sys.executable} -c "{code}"')


def test_a_command_that_hangs_takes_what_it_started_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shell that waits for another program leaves none behind: its end closes the pipe."""
    monkeypatch.setattr(limits, "KEY_COMMAND_S", 3.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(EncryptionKeyError, match="within"):
            read_key(f"command:sh -c 'sleep 600 9>{pipe}; true'")
        assert select.select([reading], [], [], 60)[0]
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)


def test_a_path_that_is_none_is_told() -> None:
    """What no file can be called is an error of ours."""
    for text in ("file:~no-such-user-here/key", "file:a\0b"):
        with pytest.raises(EncryptionKeyError, match="cannot be read"):
            read_key(text)


def test_a_new_key_file_is_private_and_never_overwrites(tmp_path: Path) -> None:
    """Mode 0600 whatever the umask, 32 random bytes, and what is there stays."""
    before = os.umask(0o777)
    try:
        made = make_key_file(tmp_path / "one")
    finally:
        os.umask(before)
    path = tmp_path / "one"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(f"file:{path}").id == made.id
    assert make_key_file(tmp_path / "two").id != made.id
    text = path.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for taken in ("one", "link"):
        with pytest.raises(EncryptionKeyError, match="never overwritten"):
            make_key_file(tmp_path / taken)
    assert path.read_bytes() == text
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(EncryptionKeyError, match="cannot be written"):
        make_key_file(tmp_path / "no" / "folder" / "key")


def test_a_key_that_could_not_be_written_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the disk full nothing of the name stays, so that the next try finds none there."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "k"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(EncryptionKeyError, match="No space left"):
            make_key_file(path)
    assert not path.exists()
    assert make_key_file(path).id == read_key(f"file:{path}").id


def test_keys_do_not_show() -> None:
    """Neither in a repr nor in a pickle; the id says which key it is."""
    key = read_key(MATERIAL)
    assert repr(key) == str(key) == f"<key {ID}>"
    with pytest.raises(TypeError):
        pickle.dumps(key)
    assert not hasattr(key, "__dict__")


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of a key says what to install."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.hashes", None)
    with pytest.raises(MissingDependencyError, match=r"ckptstore\[encryption\]"):
        read_key(MATERIAL)
