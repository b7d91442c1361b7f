"""Ways to store a state on S3: plain bytes by three clients, files of torch, DCP, and ckptstore.

Plain bytes are the rate that the endpoint gives each client: the bytes of the state, ready in
memory, as objects of the size of ckptstore's packs, with as many requests in flight as ckptstore
has (``PUTS`` and ``GETS``); they are loaded into memory, and not decoded. All clients have
their defaults, but for the row that leaves obstore's bodies unsigned, as ckptstore's packs are on a
loopback interface.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckptstore
from benchmarks.peers import flat_for_safetensors, rest_as_json
from benchmarks.states import State, flat_tensors
from ckptstore import limits
from ckptstore.backends.bucket import CAPABILITIES
from ckptstore.objects.packs import plan_packs

__all__ = ["GETS", "PUTS", "Plain", "Way", "count_bytes", "make_ways", "plain_ways"]

PUTS: Final = limits.PACKS_AT_ONCE
"""Packs in flight of a save with two workers and the default ``host_bytes``."""
GETS: Final = 8
"""Ranges in flight of a load with the default ``host_bytes``."""
_RANGE: Final = 16 << 20
_RUN: Final = "bench"
_THREADS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to keep a state under a prefix of a bucket."""

    name: str
    save: Callable[[State, str], None]
    """Gets the state and ``bucket/prefix``."""
    load: Callable[[str], object] | None = None
    load_into: Callable[[str, State], object] | None = None
    plain: bool = False
    """True if only bytes are moved: its loads give no state."""
    note: str = ""


class Plain:
    """Bytes ready to be sent, in objects as large as most of ckptstore's packs of them."""

    def __init__(self, whole: bytes) -> None:
        memory = limits.HOST_BYTES_DEFAULT
        size = plan_packs(len(whole), CAPABILITIES, threads=2, memory_bytes=memory).most_bytes
        self.parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        self.ranges = [
            (index, start, min(start + _RANGE, len(part)))
            for index, part in enumerate(self.parts)
            for start in range(0, len(part), _RANGE)
        ]

    @classmethod
    def of(cls, state: State) -> Plain:
        """Return the bytes of a state."""
        return cls(
            b"".join(
                tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                for _, tensor in flat_tensors(state)
            )
        )


def make_ways(client: Any, state: State, scratch: Path) -> list[Way]:  # noqa: ANN401 - boto3's
    """Return all ways that are installed.

    Parameters
    ----------
    client
        Of boto3.
    scratch
        A file for the ways that need one.
    """
    return [
        *plain_ways(client, Plain.of(state)),
        *_files(client, scratch),
        *_connector(),
        Way(name="DCP FsspecWriter", save=_dcp_save, load_into=_dcp_load_into),
        _store_way("ckptstore auto", codec="auto"),
        _store_way("ckptstore raw", codec="raw"),
        _store_way("ckptstore auto, s3fs", codec="auto", client="s3fs"),
        _store_way("ckptstore raw, s3fs", codec="raw", client="s3fs"),
    ]


# --- plain bytes ------------------------------------------------------------------------------


def count_bytes(parts: Any) -> int:  # noqa: ANN401 - each client has a type of its own
    """Return the number of bytes that were loaded."""
    buffers = (part.getbuffer() if isinstance(part, io.BytesIO) else part for part in parts)
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def plain_ways(client: Any, plain: Plain) -> list[Way]:  # noqa: ANN401 - boto3's
    """Return the clients that only move bytes; none of them looks at a state."""
    return [
        _plain_s3fs(plain),
        _plain_boto3(client, plain),
        _plain_transfer(client, plain),
        *_plain_obstore(plain),
    ]


def _split(place: str) -> tuple[str, str]:
    bucket, _, prefix = place.partition("/")
    return bucket, prefix


def _at_once(count: int, work: Callable[..., object], arguments: list[tuple[Any, ...]]) -> Any:  # noqa: ANN401
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda one: work(*one), arguments))


def _plain_s3fs(plain: Plain) -> Way:
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True)

    def save(_: State, place: str) -> None:
        fs.pipe({f"{place}/{i}": part for i, part in enumerate(plain.parts)}, batch_size=PUTS)

    def load(place: str) -> object:
        indexes, starts, ends = zip(*plain.ranges, strict=True)
        paths = [f"{place}/{index}" for index in indexes]
        return fs.cat_ranges(paths, starts, ends, batch_size=GETS, on_error="raise")

    return Way(name="bytes by s3fs", save=save, load=load, plain=True)


def _plain_boto3(client: Any, plain: Plain) -> Way:  # noqa: ANN401
    def save(_: State, place: str) -> None:
        bucket, prefix = _split(place)

        def put(index: int, part: bytes) -> None:
            client.put_object(Bucket=bucket, Key=f"{prefix}/{index}", Body=part)

        _at_once(PUTS, put, list(enumerate(plain.parts)))

    def load(place: str) -> object:
        bucket, prefix = _split(place)

        def get(index: int, start: int, end: int) -> bytes:
            wanted = f"bytes={start}-{end - 1}"
            answer = client.get_object(Bucket=bucket, Key=f"{prefix}/{index}", Range=wanted)
            data: bytes = answer["Body"].read()
            return data

        return _at_once(GETS, get, plain.ranges)

    return Way(name="bytes by boto3", save=save, load=load, plain=True)


def _plain_transfer(client: Any, plain: Plain) -> Way:  # noqa: ANN401
    from boto3.s3.transfer import TransferConfig

    def save(_: State, place: str) -> None:
        bucket, prefix = _split(place)
        config = TransferConfig(max_concurrency=PUTS)
        for index, part in enumerate(plain.parts):
            client.upload_fileobj(io.BytesIO(part), bucket, f"{prefix}/{index}", Config=config)

    def load(place: str) -> object:
        bucket, prefix = _split(place)
        config = TransferConfig(max_concurrency=GETS)
        buffers = [io.BytesIO() for _ in plain.parts]
        for index, buffer in enumerate(buffers):
            client.download_fileobj(bucket, f"{prefix}/{index}", buffer, Config=config)
        return buffers

    note = "parts of 8 MiB"
    return Way(name="bytes by boto3 transfers", save=save, load=load, plain=True, note=note)


def _plain_obstore(plain: Plain) -> list[Way]:
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        return []

    def opened(place: str, **options: Any) -> tuple[Any, str]:  # noqa: ANN401
        bucket, prefix = _split(place)
        store = S3Store(
            bucket,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            region="us-east-1",
            client_options={"allow_http": True, "timeout": timedelta(minutes=5)},
            **options,
        )
        return store, prefix

    def way(name: str, **options: Any) -> Way:  # noqa: ANN401
        def save(_: State, place: str) -> None:
            store, prefix = opened(place, **options)

            def put(index: int, part: bytes) -> None:
                obstore.put(store, f"{prefix}/{index}", part, use_multipart=False)

            _at_once(PUTS, put, list(enumerate(plain.parts)))

        def load(place: str) -> object:
            store, prefix = opened(place, **options)

            def get(index: int, start: int, end: int) -> object:
                return obstore.get_range(store, f"{prefix}/{index}", start=start, end=end)

            return _at_once(GETS, get, plain.ranges)

        return Way(name=name, save=save, load=load, plain=True)

    return [way("bytes by obstore"), way("bytes by obstore, unsigned", unsigned_payload=True)]


# --- files ------------------------------------------------------------------------------------


def _files(client: Any, scratch: Path) -> list[Way]:  # noqa: ANN401
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True)

    def key_of(place: str) -> tuple[str, str]:
        bucket, prefix = _split(place)
        return bucket, f"{prefix}/state.pt"

    def fs_torch_save(state: State, place: str) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        fs.pipe_file(f"{place}/state.pt", buffer.getvalue())

    def fs_torch_load(place: str) -> object:
        return torch.load(io.BytesIO(fs.cat_file(f"{place}/state.pt")), weights_only=True)

    def fs_safetensors_save(state: State, place: str) -> None:
        data = safetensors.torch.save(flat_for_safetensors(state), {"rest": rest_as_json(state)})
        fs.pipe_file(f"{place}/state.safetensors", data)

    def fs_safetensors_load(place: str) -> object:
        return safetensors.torch.load(fs.cat_file(f"{place}/state.safetensors"))

    def boto_file_save(state: State, place: str) -> None:
        torch.save(state, scratch)
        client.upload_file(str(scratch), *key_of(place))

    def boto_file_load(place: str) -> object:
        client.download_file(*key_of(place), str(scratch))
        return torch.load(scratch, weights_only=True)

    def boto_object_save(state: State, place: str) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        client.upload_fileobj(buffer, *key_of(place))

    def boto_object_load(place: str) -> object:
        buffer = io.BytesIO()
        client.download_fileobj(*key_of(place), buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    return [
        Way(name="s3fs, torch.save", save=fs_torch_save, load=fs_torch_load),
        Way(name="s3fs, safetensors", save=fs_safetensors_save, load=fs_safetensors_load),
        Way(
            name="boto3 file, torch.save",
            save=boto_file_save,
            load=boto_file_load,
            note="by way of a local file, not fsynced",
        ),
        Way(name="boto3 fileobj, torch.save", save=boto_object_save, load=boto_object_load),
    ]


def _connector() -> list[Way]:
    """Return AWS's connector for PyTorch, if it is installed."""
    try:
        from s3torchconnector import S3Checkpoint, S3ClientConfig
    except ImportError:
        return []

    def checkpoint() -> Any:  # noqa: ANN401
        return S3Checkpoint(
            region="us-east-1",
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            s3client_config=S3ClientConfig(force_path_style=True),
        )

    def save(state: State, place: str) -> None:
        with checkpoint().writer(f"s3://{place}/state.pt") as writer:
            torch.save(state, writer)

    def load(place: str) -> object:
        with checkpoint().reader(f"s3://{place}/state.pt") as reader:
            return torch.load(reader, weights_only=True)

    return [Way(name="s3torchconnector, torch.save", save=save, load=load)]


# --- DCP and ckptstore ------------------------------------------------------------------------


def _dcp_save(state: State, place: str) -> None:
    writer = FsspecWriter(f"s3://{place}", thread_count=_THREADS)
    dcp_save(state, storage_writer=writer, no_dist=True)


def _dcp_load_into(place: str, state: State) -> object:
    dcp_load(state, storage_reader=FsspecReader(f"s3://{place}"), no_dist=True)
    return state


def _store_way(name: str, *, codec: str, **options: Any) -> Way:  # noqa: ANN401 - as for open
    def save(state: State, place: str) -> None:
        with ckptstore.open(f"s3://{place}", codec=codec, **options) as store:
            store.run(_RUN).save(state, step=1)

    def load(place: str) -> object:
        with ckptstore.open(f"s3://{place}", read_only=True, **options) as store:
            return store.load(f"{_RUN}@latest")

    def load_into(place: str, state: State) -> object:
        with ckptstore.open(f"s3://{place}", read_only=True, **options) as store:
            return store.load(f"{_RUN}@latest", into=state)

    return Way(name=name, save=save, load=load, load_into=load_into, note="verified")
