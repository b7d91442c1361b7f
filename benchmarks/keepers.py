"""Ways to keep many versions of one state: ckptstore, files by peers, and backup programs.

A keeper gets a folder and the versions one after the other. Each save is durable when it returns
(see :mod:`benchmarks.peers`), and counts all the work of a user: with restic and borg, writing the
file with torch.save, and backing it up, as one command of theirs each. The stored bytes are only
those that the keeper needs to give a version back.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import ckptstore
from benchmarks.disk import fsync_tree, tree_bytes
from benchmarks.peers import PEERS, Peer
from benchmarks.states import State

__all__ = ["Keeper", "Kept", "absent", "keepers"]

_RUN = "bench"
_THREADS = 2
_ZIPNN_BYTES_MIN = 1024
"""Smaller tensors are kept as they are: ZipNN's header alone has 70 bytes."""


class Kept(Protocol):
    """Versions stored by one keeper."""

    def save(self, state: State, number: int) -> None:
        """Store a version; return when it is durable."""

    def load(self, number: int, target: State) -> object:
        """Return a version, with nothing open before; `target` is for keepers that fill tensors."""

    def stored_bytes(self) -> int:
        """Return the bytes of all versions together."""

    def close(self) -> None:
        """Release everything that is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """One way to keep versions."""

    name: str
    start: Callable[[Path], Kept]
    note: str = ""
    lossless: bool = True
    backs_up: bool = False
    """True for a program that takes a second for each version of any size."""


def keepers(only: Sequence[str] = ()) -> list[Keeper]:
    """Return all keepers that are installed here, or those of them in `only`."""
    made = [
        *(Keeper(name=peer.name, start=_files(peer)) for peer in PEERS if _is_kept(peer)),
        Keeper(name="ZipNN", start=_Zipnn, note="in one file by torch.save"),
        Keeper(name="restic", start=_Restic, note="torch.save, then backup", backs_up=True),
        Keeper(name="borg", start=_Borg, note="torch.save, then create, zstd", backs_up=True),
        Keeper(name="ckptstore auto", start=_stores("auto")),
        Keeper(name="ckptstore planes", start=_stores("planes")),
        Keeper(name="ckptstore delta", start=_stores("delta")),
        Keeper(
            name="ckptstore bf16 + int8",
            start=_stores("delta", _ROUNDED),
            note="weights bf16, first moments int8",
            lossless=False,
        ),
        Keeper(
            name="ckptstore bf16 + 8 bit",
            start=_stores("delta", {**_ROUNDED, "optimizer.*.exp_avg_sq": "dynamic8"}),
            note="and second moments dynamic8",
            lossless=False,
        ),
    ]
    missing = absent()
    return [one for one in made if one.name not in missing and (not only or one.name in only)]


_ROUNDED = {"model.*": "bf16", "optimizer.*.exp_avg": "int8"}


def absent() -> dict[str, str]:
    """Return the keepers that are not installed here, with how to get them."""
    missing = {}
    try:
        import zipnn  # noqa: F401 - whether it is there
    except ImportError:
        missing["ZipNN"] = "pip install zipnn (needs a C compiler)"
    for name, package in (("restic", "restic"), ("borg", "borgbackup")):
        if shutil.which(name) is None:
            missing[name] = f"apt-get install {package}"
    return missing


# --- files, one a version -----------------------------------------------------------------------


class _Files:
    """Each version in a folder of its own."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        self._peer = peer
        self._folder = folder

    def _of(self, number: int) -> Path:
        return self._folder / f"{number:03d}"

    def save(self, state: State, number: int) -> None:
        self._of(number).mkdir()
        self._peer.save(state, self._of(number))

    def load(self, number: int, target: State) -> object:
        if self._peer.load_into is not None:
            return self._peer.load_into(self._of(number), target)
        assert self._peer.load is not None  # noqa: S101 - a peer has one or the other
        return self._peer.load(self._of(number))

    def stored_bytes(self) -> int:
        return tree_bytes(self._folder)

    def close(self) -> None:
        pass


def _is_kept(peer: Peer) -> bool:
    return peer.name in {"torch.save", "safetensors", "DCP", "DCP + zstd"}


def _files(peer: Peer) -> Callable[[Path], Kept]:
    return lambda folder: _Files(peer, folder)


class _Zipnn(_Files):
    """ZipNN for each tensor of floats; the compressed tensors in one file."""

    def __init__(self, folder: Path) -> None:
        peer = next(peer for peer in PEERS if peer.name == "torch.save")
        super().__init__(peer, folder)
        from zipnn import ZipNN

        self._coder = ZipNN(input_format="torch", threads=_THREADS)

    def save(self, state: State, number: int) -> None:
        super().save(_mapped(state, self._packed), number)

    def load(self, number: int, target: State) -> object:
        assert self._peer.load is not None  # noqa: S101 - torch.save's
        return _mapped(self._peer.load(self._of(number)), self._unpacked, leaf=_is_packed)

    def _packed(self, tensor: torch.Tensor) -> object:
        if not tensor.is_floating_point() or tensor.nbytes < _ZIPNN_BYTES_MIN:
            return tensor
        # It changes its argument: a training's tensors have to be copied.
        packed = bytearray(self._coder.compress(tensor.clone()))
        return {"zipnn": torch.frombuffer(packed, dtype=torch.uint8)}

    def _unpacked(self, packed: Any) -> object:  # noqa: ANN401 - a packed tensor
        data = packed["zipnn"] if isinstance(packed, dict) else packed
        if data is packed:
            return packed
        return self._coder.decompress(data.numpy().tobytes())


def _is_packed(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, dict) and set(value) == {"zipnn"})


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _mapped(
    value: Any,  # noqa: ANN401 - a state
    change: Callable[[Any], object],
    *,
    leaf: Callable[[object], bool] = _is_tensor,
) -> Any:  # noqa: ANN401 - the same
    """Return a state with each leaf changed."""
    if leaf(value):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change, leaf=leaf) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change, leaf=leaf) for item in value]
    return value


# --- backup programs ----------------------------------------------------------------------------


class _Backup:
    """A file that is rewritten for each version, and a repository that it is backed up to."""

    def __init__(self, folder: Path) -> None:
        self._work, self._repo, self._out = (folder / name for name in ("work", "repo", "out"))
        self._work.mkdir()
        self._environment = {**os.environ, **self.environment(folder)}
        self.tell(*self.beginning())

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the settings of the program."""
        raise NotImplementedError

    def beginning(self) -> list[str]:
        """Return the command that makes the repository."""
        raise NotImplementedError

    def tell(self, *command: str, where: Path | None = None) -> str:
        """Run a command; return its output."""
        done = subprocess.run(
            command,
            cwd=where or self._work,
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    def keep(self, number: int) -> None:
        """Back the file up."""
        raise NotImplementedError

    def restore(self, number: int, out: Path) -> None:
        """Write the file of a version below a folder."""
        raise NotImplementedError

    def save(self, state: State, number: int) -> None:
        torch.save(state, self._work / "state.pt")
        self.keep(number)
        fsync_tree(self._repo)

    def load(self, number: int, target: State) -> object:
        shutil.rmtree(self._out, ignore_errors=True)
        self._out.mkdir()
        self.restore(number, self._out)
        return torch.load(next(self._out.rglob("state.pt")), weights_only=True)

    def stored_bytes(self) -> int:
        return tree_bytes(self._repo)

    def close(self) -> None:
        pass


class _Restic(_Backup):
    """restic, repository version 2, which compresses."""

    def environment(self, folder: Path) -> dict[str, str]:
        self._ids: dict[int, str] = {}
        return {
            "RESTIC_REPOSITORY": str(folder / "repo"),
            "RESTIC_PASSWORD": "bench",
            "RESTIC_CACHE_DIR": str(folder / "cache"),
        }

    def beginning(self) -> list[str]:
        return ["restic", "init", "--quiet", "--repository-version", "2"]

    def keep(self, number: int) -> None:
        said = self.tell("restic", "backup", "--json", "--quiet", "state.pt")
        self._ids[number] = json.loads(said.splitlines()[-1])["snapshot_id"]

    def restore(self, number: int, out: Path) -> None:
        self.tell("restic", "restore", "--quiet", self._ids[number], "--target", str(out))


class _Borg(_Backup):
    """borg, not encrypted, with zstd at level 1."""

    def environment(self, folder: Path) -> dict[str, str]:
        return {"BORG_REPO": str(folder / "repo"), "BORG_BASE_DIR": str(folder / "borg")}

    def beginning(self) -> list[str]:
        return ["borg", "init", "--encryption", "none"]

    def keep(self, number: int) -> None:
        self.tell("borg", "create", "--compression", "zstd,1", f"::{number}", "state.pt")

    def restore(self, number: int, out: Path) -> None:
        self.tell("borg", "extract", f"::{number}", where=out)


# --- ckptstore ----------------------------------------------------------------------------------


class Stored:
    """Versions of one run of a store that stays open, as in a training loop."""

    def __init__(
        self, folder: Path, codec: str, encodings: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder / "store"
        self._store = ckptstore.open(self._folder, create=True, codec=codec)
        more: dict[str, Any] = {"encodings": encodings} if encodings else {}
        self._more = more
        self.ids: list[str] = []

    def save(self, state: State, number: int) -> None:
        """Save a version; its number is its place in `ids`."""
        version = self._store.run(_RUN).save(state, step=number, **self._more)
        self.ids.append(version.id)

    def load(self, number: int, target: State) -> object:
        """Fill the target from a version."""
        with ckptstore.open(self._folder, read_only=True) as store:
            return store.load(f"{_RUN}@{number}", into=target)

    def stored_bytes(self) -> int:
        """Return the bytes of the whole store."""
        return tree_bytes(self._folder)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    @property
    def store(self) -> ckptstore.Store:
        """The open store, to look into it."""
        return self._store


def _stores(codec: str, encodings: Mapping[str, str] | None = None) -> Callable[[Path], Kept]:
    return lambda folder: Stored(folder, codec, encodings)
