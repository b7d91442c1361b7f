"""Sources of a user's key: a file, a variable of the environment, or a command.

::

    file:/etc/ckptstore/key         32 bytes as they are, or 64 hex digits, or base64 of 32 bytes
    env:CKPTSTORE_SECRET            hex or base64
    command:vault read -field=k x   the command's output: as in a file

A command is run without a shell (write ``command:sh -c '...'`` for one), with empty stdin; its
stderr goes to this process's. Nothing that is read here is ever part of an error.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import os
import secrets
import select
import shlex
import signal
import stat
import subprocess
from pathlib import Path
from typing import Final, TypeAlias

from ckptstore import limits
from ckptstore.backends.posix_publish import NEW_FILE, sync_folder
from ckptstore.backends.sealing import KEY_BYTES, UserKey
from ckptstore.config import SYSTEM, Environment
from ckptstore.errors import EncryptionKeyError

_log = logging.getLogger("ckptstore")

KeyInput: TypeAlias = "str | bytes | UserKey"
"""A key as a caller may give it: a spec as above, 32 bytes, or a key that was read."""

KEY_HINT: Final = "give file:PATH, env:NAME or command:CMD"

_FORMS: Final = f"{KEY_BYTES} bytes, 64 hex digits, or base64 of {KEY_BYTES} bytes"
_PRINTABLE: Final = frozenset(range(0x20, 0x7F))


def read_key(key: KeyInput, *, environment: Environment = SYSTEM) -> UserKey:
    """Return the key that a spec names.

    Raises
    ------
    EncryptionKeyError
        The spec is malformed; or its file, variable or command is missing, fails, or yields
        something that is no key.
    MissingDependencyError
        The package ``cryptography`` is not installed.
    """
    if isinstance(key, UserKey):
        return key
    if isinstance(key, bytes | bytearray):
        return UserKey(bytes(key))
    source, _, rest = key.partition(":") if is_key_spec(key) else ("", "", "")
    if not rest:
        # The text itself may be a key, given where its spec belongs.
        raise EncryptionKeyError("the text given as a key is not the place of one", hint=KEY_HINT)
    if source == "file":
        return UserKey(_parse(_from_file(rest), key))
    if source == "env":
        return UserKey(_parse(_from_variable(rest), key, text=True))
    return UserKey(_parse(_from_command(rest, environment), f"command:{_name(rest)} ..."))


def hidden(key: KeyInput | None) -> KeyInput | None:
    """Return a key whose ``repr`` does not show it: bytes as a :class:`UserKey`, others as given.

    Tools that report errors print the local variables of every frame, so a function that takes a
    key assigns this to the parameter before it does anything else.

    Raises
    ------
    EncryptionKeyError
        The bytes are no key.
    """
    return read_key(key) if isinstance(key, bytes | bytearray) else key


def is_key_spec(value: object) -> bool:
    """Return whether a value is surely meant as a key: a spec, bytes, or a key that was read."""
    if isinstance(value, str):
        return value.startswith(("file:", "env:", "command:"))
    return isinstance(value, bytes | bytearray | UserKey)


def make_key_file(path: str | os.PathLike[str]) -> UserKey:
    """Write a new random key, as hex, to a file that only its owner can read; return the key.

    Raises
    ------
    EncryptionKeyError
        The path exists, and is never replaced; or it cannot be written.
    """
    where = Path(path)
    material = secrets.token_bytes(KEY_BYTES)
    made = False
    try:
        descriptor = os.open(where, NEW_FILE, 0o600)
        made = True
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # regardless of the umask
            file.write(material.hex().encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        sync_folder(str(where.absolute().parent))
    except FileExistsError as error:
        msg = f"{str(where)!r} is there already, and a key is never overwritten"
        raise EncryptionKeyError(msg, hint="name another file") from error
    except OSError as error:
        if made:  # the incomplete file holds no key, and would be in the way of the next try
            with contextlib.suppress(OSError):
                where.unlink()
        msg = f"the key file {str(where)!r} cannot be written: {error.strerror}"
        raise EncryptionKeyError(msg) from error
    return UserKey(material)


def _from_file(text: str) -> bytes:
    path = Path(text)
    try:
        path = path.expanduser()
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(limits.KEY_TEXT_BYTES_MAX + 1)
    except (OSError, ValueError, RuntimeError) as error:  # the last two: no path, no such home
        why = error.strerror if isinstance(error, OSError) else str(error)
        msg = f"the key file {str(path)!r} cannot be read: {why}"
        hint = "name the file that holds the key; for a new store ckptstore key new FILE makes one"
        raise EncryptionKeyError(msg, hint=hint) from error
    if stat.S_ISREG(mode) and mode & 0o077:
        _log.warning("the key file %s can be read or changed by others: chmod 600 %s", path, path)
    return data


def _from_variable(name: str) -> bytes:
    value = os.environ.get(name)
    if value is None:
        msg = f"the variable {name!r} is not set"
        raise EncryptionKeyError(msg, hint=f"export {name}: {_FORMS.partition(', ')[2]}")
    return value.encode(errors="replace")[: limits.KEY_TEXT_BYTES_MAX + 1]


def _name(command: str) -> str:
    """Return the first word of a command; the words after it may be a secret."""
    return command.split(maxsplit=1)[0][:80] if command.split() else ""


def _from_command(command: str, environment: Environment) -> bytes:
    name = _name(command)
    try:
        words = shlex.split(command)
        if not words:
            raise ValueError("it is empty")
        child = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        msg = f"the command {name!r}, which prints the key, cannot be run: {why}"
        raise EncryptionKeyError(msg) from error
    with child:
        try:
            data = _output(child, environment.monotonic() + limits.KEY_COMMAND_S, environment)
        finally:
            if child.poll() is None:  # then its process group exists: end its children too
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
                    os.killpg(child.pid, signal.SIGKILL)
    if data is None:
        msg = f"the command {name!r} printed no key within {limits.KEY_COMMAND_S:.0f} s"
        raise EncryptionKeyError(msg)
    if child.returncode and len(data) <= limits.KEY_TEXT_BYTES_MAX:
        msg = f"the command {name!r}, which prints the key, failed with {child.returncode}"
        raise EncryptionKeyError(msg, hint="its own message is on stderr")
    return data


def _output(
    child: subprocess.Popen[bytes], deadline: float, environment: Environment
) -> bytes | None:
    """Return a command's output, bounded; None if it does not end in time."""
    assert child.stdout is not None  # noqa: S101  # for the type checker
    descriptor, data = child.stdout.fileno(), b""
    ready = select.poll()  # select() refuses descriptors above 1,023
    ready.register(descriptor, select.POLLIN)
    while len(data) <= limits.KEY_TEXT_BYTES_MAX:
        left = deadline - environment.monotonic()
        if left <= 0 or not ready.poll(left * 1000):
            return None
        more = os.read(descriptor, limits.KEY_TEXT_BYTES_MAX)
        if not more:
            try:
                child.wait(max(0.0, deadline - environment.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            return data
        data += more
    return data


def _parse(data: bytes, where: str, *, text: bool = False) -> bytes:
    """Return the 32 bytes of a key written as raw bytes, hex or base64."""
    stripped = data.strip()
    if len(data) > limits.KEY_TEXT_BYTES_MAX or not stripped:
        what = "empty" if not stripped else "too long"
        raise EncryptionKeyError(f"{where}: the key is {what}", hint=f"a key is {_FORMS}")
    if len(data) == KEY_BYTES and not text and not _PRINTABLE.issuperset(stripped):
        return data
    for decode in (binascii.unhexlify, _base64):
        try:
            found = decode(stripped)
        except (binascii.Error, ValueError):
            continue
        if len(found) == KEY_BYTES:
            return found
    hint = f"a key is {_FORMS}; a passphrase is none. ckptstore key new FILE makes one"
    raise EncryptionKeyError(f"{where}: the content is no key", hint=hint)


def _base64(text: bytes) -> bytes:
    return base64.b64decode(text.translate(bytes.maketrans(b"-_", b"+/")), validate=True)
