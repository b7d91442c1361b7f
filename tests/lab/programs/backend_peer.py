"""Uses one backend as it is told, line by line (see labkit/peers.py for the protocol).

Imports no torch: it starts in a second even where a system call costs 25 microseconds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.errors import CkptStoreError, ObjectExistsError

BYTES_MAX = 64 * limits.MIB


def content_of(seed: int, size_bytes: int) -> bytes:
    """Return bytes that only this seed gives."""
    return hashlib.shake_128(str(seed).encode()).digest(size_bytes)


def race(backend: Backend, keys: list[str], mine: str) -> dict[str, list[str]]:
    """Try to create every one of `keys`; return which were won and which were lost."""
    won, lost = [], []
    for key in keys:
        try:
            backend.put_if_absent(key, mine.encode())
            won.append(key)
        except ObjectExistsError:
            lost.append(key)
    return {"won": won, "lost": lost}


class Session:
    """The backend that is open, and what can be asked of it."""

    def __init__(self) -> None:
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        """Return the open backend."""
        assert self._backend is not None, "open comes first"
        return self._backend

    def answer(self, do: str, words: dict[str, Any]) -> object:
        """Carry out one request and return its result."""
        match do:
            case "open":
                self._backend = open_backend(words["url"], **words["options"])
                return {"name": self.backend.name}
            case "put_if_absent":
                self.backend.put_if_absent(words["key"], words["text"].encode())
                return None
            case "race":
                return race(self.backend, words["keys"], words["mine"])
            case "get":
                return self.backend.get(words["key"], bytes_max=BYTES_MAX).decode()
            case "list":
                return [info.key for info in self.backend.list(words["prefix"])]
            case "delete":
                self.backend.delete(words["key"])
                return None
            case "write":
                return self._write(words["key"], words["seed"], words["size_bytes"])
            case "digest":
                return self._digest(words["key"])
            case _:
                message = f"cannot {do}"
                raise ValueError(message)

    def _write(self, key: str, seed: int, size_bytes: int) -> str:
        content = content_of(seed, size_bytes)
        with self.backend.open_writer(key) as writer:
            for start in range(0, size_bytes, limits.MIB):
                writer.write(content[start : start + limits.MIB])
            writer.commit()
        return hashlib.sha256(content).hexdigest()

    def _digest(self, key: str) -> str:
        content = bytearray(self.backend.stat(key).size_bytes)
        self.backend.read_into(key, 0, [memoryview(content)])
        return hashlib.sha256(content).hexdigest()


def main() -> None:
    """Answer until the input ends."""
    session = Session()
    for line in sys.stdin:
        words = json.loads(line)
        number, do = words.pop("id"), words.pop("do")
        try:
            event = {"event": "done", "result": session.answer(do, words)}
        except CkptStoreError as error:
            event = {"event": "failed", "kind": error.kind, "message": str(error)}
        except Exception as error:  # noqa: BLE001 - the one who asked decides
            event = {"event": "failed", "kind": type(error).__name__, "message": str(error)}
        sys.stdout.write(json.dumps({"id": number, **event}) + "\n")
        sys.stdout.flush()


main()
