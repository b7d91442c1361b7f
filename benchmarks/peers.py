"""Other ways to store the same state in files, each as durable as possible from outside.

Every `save` returns when files and folders are fsynced, whether the peer does so itself (DCP, its
files and ``.metadata``, but no folder) or not (torch.save, safetensors, torchsnapshot,
torch_checkpointing). Every load into new memory ends with one byte of each page read
(:func:`touch`), so that a peer that maps files has at least read them. None of the peers verifies
the data that it reads; ckptstore always does.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.disk import fsync_file, fsync_folder, fsync_tree
from benchmarks.states import State, flat_tensors

__all__ = [
    "PEERS",
    "Peer",
    "empty_like",
    "flat_for_safetensors",
    "quiet",
    "rest_as_json",
    "touch",
    "touched",
]

_PAGE = 4096
_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way to save and to load."""

    name: str
    save: Callable[[State, Path], None]
    """Into an empty folder; durable on return."""
    load: Callable[[Path], object] | None = None
    """Into new memory; returns the state, or its tensors by path."""
    load_into: Callable[[Path, State], object] | None = None
    """Into the tensors of a state that exists."""
    row: Callable[[Path, str, int], torch.Tensor] | None = None
    """One row of the tensor at a path (state's keys), reading as little as the peer can."""
    mapped: bool = False
    """Whether `load` maps the file: its pages are then read by touching them, and not copied."""


def touch(state: object) -> int:
    """Read one byte of every page of every tensor; return their sum, so that nothing is skipped."""
    total = 0
    for _, tensor in flat_tensors(state):
        if tensor.numel():
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            total += int(flat[::_PAGE].sum())
    return total


def touched(load: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a load that reads a byte of every page, too."""

    def run(folder: Path) -> object:
        state = load(folder)
        touch(state)
        return state

    return run


def empty_like(state: object) -> Any:  # noqa: ANN401 - a state of the same shape
    """Return a state with new tensors, all pages written, in place of those of `state`."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state).fill_(1)
    if isinstance(state, Mapping):
        return {key: empty_like(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(empty_like(value) for value in state)
    return state


def quiet() -> None:
    """Silence warnings that peers give about themselves on every save."""
    warnings.filterwarnings("ignore", module=r"torch\.distributed.*")
    warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")


# --- torch.save -------------------------------------------------------------------------------


def _torch_save(state: State, folder: Path) -> None:
    path = folder / "state.pt"
    torch.save(state, path)
    fsync_file(path)
    fsync_folder(folder)


def _torch_load(folder: Path) -> object:
    return torch.load(folder / "state.pt", weights_only=True)


def _torch_load_mmap(folder: Path) -> object:
    return torch.load(folder / "state.pt", weights_only=True, mmap=True)


def _torch_load_into(folder: Path, state: State) -> object:
    return _copied(dict(flat_tensors(_torch_load_mmap(folder))), state)


def _copied(loaded: Mapping[str, torch.Tensor], state: State) -> State:
    """Copy tensors into those of a state, as ``load_state_dict`` does."""
    for path, tensor in flat_tensors(state):
        tensor.copy_(loaded[path])
    return state


def _torch_row(folder: Path, path: str, row: int) -> torch.Tensor:
    loaded = dict(flat_tensors(_torch_load_mmap(folder)))
    return loaded[path][row].clone()


# --- safetensors ------------------------------------------------------------------------------


def flat_for_safetensors(state: State) -> dict[str, torch.Tensor]:
    """Return the tensors by dotted path: safetensors holds nothing else."""
    return dict(flat_tensors(state))


def rest_as_json(state: object) -> str:
    """Return the values that are no tensors as JSON, for the header of a safetensors file."""

    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return None
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    return json.dumps(plain(state))


def _safetensors_save(state: State, folder: Path) -> None:
    path = folder / "state.safetensors"
    save_file(flat_for_safetensors(state), path, metadata={"rest": rest_as_json(state)})
    fsync_file(path)
    fsync_folder(folder)


def _safetensors_load(folder: Path) -> object:
    return load_file(folder / "state.safetensors")


def _safetensors_load_into(folder: Path, state: State) -> object:
    return _copied(load_file(folder / "state.safetensors"), state)


def _safetensors_row(folder: Path, path: str, row: int) -> torch.Tensor:
    with safe_open(folder / "state.safetensors", framework="pt") as file:
        piece: torch.Tensor = file.get_slice(path)[row].clone()
    return piece


# --- torch.distributed.checkpoint -------------------------------------------------------------


def _dcp_save(state: State, folder: Path) -> None:
    writer = FileSystemWriter(folder, sync_files=True, thread_count=_THREADS)
    dcp_save(state, storage_writer=writer, no_dist=True)
    fsync_folder(folder)


def _dcp_save_zstd(state: State, folder: Path) -> None:
    writer = FileSystemWriter(
        folder, sync_files=True, thread_count=_THREADS, _extensions=[ZStandard()]
    )
    dcp_save(state, storage_writer=writer, no_dist=True)
    fsync_folder(folder)


def _dcp_load_into(folder: Path, state: State) -> object:
    dcp_load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


def _dcp_row(folder: Path, path: str, row: int) -> torch.Tensor:
    """Load the tensor that holds the row: without a process group DCP reads whole tensors."""
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata[path]
    if not isinstance(stored, TensorStorageMetadata):
        raise TypeError(path)
    wanted = {path: torch.empty(stored.size, dtype=stored.properties.dtype)}
    dcp_load(wanted, storage_reader=reader, no_dist=True)
    return wanted[path][row]


# --- torchsnapshot ----------------------------------------------------------------------------


def _snapshot_save(state: State, folder: Path) -> None:
    import torchsnapshot

    app = {"state": torchsnapshot.StateDict(**state)}
    torchsnapshot.Snapshot.take(str(folder / "snapshot"), app)
    fsync_tree(folder)


def _snapshot_load_into(folder: Path, state: State) -> object:
    import torchsnapshot

    holder = torchsnapshot.StateDict(**state)
    torchsnapshot.Snapshot(str(folder / "snapshot")).restore({"state": holder})
    return dict(holder)


def _snapshot_row(folder: Path, path: str, row: int) -> torch.Tensor:
    """Read the tensor that holds the row: torchsnapshot reads whole objects."""
    import torchsnapshot

    snapshot = torchsnapshot.Snapshot(str(folder / "snapshot"))
    section, part, parameter = path.split(".", 2)
    found: torch.Tensor = snapshot.read_object(f"0/state/{section}/{part}/{parameter}")
    return found[row]


# --- torch_checkpointing ------------------------------------------------------------------------


def _manager() -> Any:  # noqa: ANN401 - it has no types that could be named without importing it
    """Return a manager that saves in this process, without O_DIRECT: ext4 refuses its writes."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    return CheckpointManager(config)


def _manager_save(state: State, folder: Path) -> None:
    manager = _manager()
    manager.save(str(folder / "checkpoint"), state)
    manager.close()
    fsync_tree(folder)


def _manager_load_into(folder: Path, state: State) -> object:
    manager = _manager()
    loaded: object = manager.load(str(folder / "checkpoint"), into=state)
    manager.close()
    return loaded


PEERS = (
    Peer(name="torch.save", save=_torch_save, load=_torch_load, row=_torch_row),
    Peer(
        name="safetensors",
        save=_safetensors_save,
        load=_safetensors_load,
        load_into=_safetensors_load_into,
        row=_safetensors_row,
        mapped=True,
    ),
    Peer(name="DCP", save=_dcp_save, load_into=_dcp_load_into, row=_dcp_row),
    Peer(name="DCP + zstd", save=_dcp_save_zstd, load_into=_dcp_load_into),
    Peer(
        name="torchsnapshot", save=_snapshot_save, load_into=_snapshot_load_into, row=_snapshot_row
    ),
    Peer(name="torch_checkpointing", save=_manager_save, load_into=_manager_load_into),
)
TORCH_MMAP = Peer(
    name="torch.save",
    save=_torch_save,
    load=_torch_load_mmap,
    load_into=_torch_load_into,
    mapped=True,
)
