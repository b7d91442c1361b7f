"""Clients that save to S3 and load from it over many connections, each as its own docs advise.

Every client gets the width, the number of connections, by an option of its own where it has one,
and parts of 8 MiB where it lets one choose, so that all widths can be used. boto3, s3fs and obstore
only move bytes, which are ready in memory, and make no state of them; the others save and load a
state. Bodies are not signed where a client can leave that out: the server stands for one
behind TLS, where none of them signs bodies.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch

import ckptstore
from benchmarks.states import State, flat_tensors

__all__ = ["WAYS", "Way", "state_as_bytes"]

_PART: Final = 8 << 20
_REGION: Final = "us-east-1"
_RUN: Final = "bench"
_GBPS_OF_A_CONNECTION: Final = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One client; its functions get ``bucket/prefix``, and the width or None for its default."""

    name: str
    save: Callable[[Any, str, int | None], None]
    load: Callable[[str, int | None], object] | None = None
    load_into: Callable[[str, int | None, State], object] | None = None
    plain: bool = False
    """True if only bytes are moved: it saves bytes, and loads parts of them, in order."""
    knob: str = ""
    """The option that limits the connections; empty without one."""
    begin: Callable[[str], None] = lambda _: None
    """Makes what exists before the first save of a training."""
    narrow: bool = False
    """True if its loads use one connection or two, whatever the width."""


def state_as_bytes(state: State) -> bytes:
    """Return the bytes of all tensors."""
    return b"".join(
        tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for _, tensor in flat_tensors(state)
    )


def _split(place: str) -> tuple[str, str]:
    bucket, _, prefix = place.partition("/")
    return bucket, f"{prefix}/state"


def _endpoint() -> str:
    return os.environ["AWS_ENDPOINT_URL"]


# --- bytes ------------------------------------------------------------------------------------


def _boto3() -> Way:
    """boto3's transfers.

    Its guide, "File transfer configuration": raise ``max_concurrency`` (10) for more bandwidth;
    botocore's ``max_pool_connections`` (10) has to follow, and, for bytes in memory,
    s3transfer's ``max_in_memory_upload_chunks`` (10).
    """

    def made(width: int | None) -> tuple[Any, Any]:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        unsigned = {"payload_signing_enabled": False}
        if width is None:
            return boto3.client("s3", config=Config(s3=unsigned)), TransferConfig()
        config = Config(max_pool_connections=width, s3=unsigned)
        transfer = TransferConfig(max_concurrency=width)
        transfer.max_in_memory_upload_chunks = width
        return boto3.client("s3", config=config), transfer

    def save(data: bytes, place: str, width: int | None) -> None:
        client, config = made(width)
        client.upload_fileobj(io.BytesIO(data), *_split(place), Config=config)

    def load(place: str, width: int | None) -> object:
        client, config = made(width)
        buffer = io.BytesIO()
        client.download_fileobj(*_split(place), buffer, Config=config)
        return [buffer.getbuffer()]

    return Way(name="bytes by boto3", save=save, load=load, plain=True, knob="max_concurrency")


def _s3fs() -> Way:
    """s3fs.

    Its reference of ``S3FileSystem``: ``max_concurrency`` (10) is the number of transfers of one
    file; the pool of connections is botocore's, as for boto3. Chunks of 50 MiB, its default, would
    be 20 for a GB.
    """

    def made(width: int | None) -> Any:  # noqa: ANN401 - s3fs's
        import s3fs

        more: dict[str, Any] = {}
        if width is not None:
            more = {
                "max_concurrency": width,
                "config_kwargs": {"max_pool_connections": width},
                "default_block_size": _PART,
            }
        return s3fs.S3FileSystem(skip_instance_cache=True, **more)

    def save(data: bytes, place: str, width: int | None) -> None:
        size = {} if width is None else {"chunksize": _PART}
        made(width).pipe_file("/".join(_split(place)), data, **size)

    def load(place: str, width: int | None) -> object:
        return [made(width).cat_file("/".join(_split(place)))]

    return Way(name="bytes by s3fs", save=save, load=load, plain=True, knob="max_concurrency")


def _obstore() -> Way:
    """Obstore.

    Its reference of ``put``: ``max_concurrency`` (12) uploads of ``chunk_size`` (5 MiB). It has no
    download in parts; its page "Performance" names many requests, by the asynchronous API or in a
    pool of threads, which took a tenth of the time here.
    """

    def made(place: str) -> tuple[Any, str]:
        from obstore.store import S3Store

        bucket, key = _split(place)
        options: Any = {"allow_http": True, "timeout": timedelta(minutes=5)}
        store = S3Store(
            bucket,
            endpoint=_endpoint(),
            region=_REGION,
            unsigned_payload=True,
            client_options=options,
        )
        return store, key

    def save(data: bytes, place: str, width: int | None) -> None:
        import obstore

        store, key = made(place)
        size = {} if width is None else {"chunk_size": _PART, "max_concurrency": width}
        obstore.put(store, key, data, use_multipart=True, **size)  # type: ignore[arg-type]

    def load(place: str, width: int | None) -> object:
        import obstore

        store, key = made(place)
        size = obstore.head(store, key)["size"]

        def one(at: int) -> object:
            return obstore.get_range(store, key, start=at, end=min(at + _PART, size))

        with ThreadPoolExecutor(width or 12) as pool:
            return list(pool.map(one, range(0, size, _PART)))

    return Way(name="bytes by obstore", save=save, load=load, plain=True, knob="max_concurrency")


# --- states -----------------------------------------------------------------------------------


def _connector_config(width: int | None) -> Any:  # noqa: ANN401 - the connector's
    """Return the settings of AWS's connector for PyTorch.

    Its reference of ``S3ClientConfig``: ``throughput_target_gbps`` (10.0) is the rate to reach,
    and the client below plans a connection for each 0.4; ``part_size`` is 8 MiB.
    """
    from s3torchconnector import S3ClientConfig

    if width is None:
        return S3ClientConfig(force_path_style=True)
    return S3ClientConfig(
        force_path_style=True, throughput_target_gbps=width * _GBPS_OF_A_CONNECTION
    )


def _connector() -> Way:
    """``S3Checkpoint`` of the connector, with its default reader, which its README advises."""

    def made(width: int | None) -> Any:  # noqa: ANN401 - the connector's
        from s3torchconnector import S3Checkpoint

        config = _connector_config(width)
        return S3Checkpoint(region=_REGION, endpoint=_endpoint(), s3client_config=config)

    def save(state: State, place: str, width: int | None) -> None:
        with made(width).writer(f"s3://{place}/state.pt") as writer:
            torch.save(state, writer)

    def load(place: str, width: int | None) -> object:
        with made(width).reader(f"s3://{place}/state.pt") as reader:
            return torch.load(reader, weights_only=True)

    return Way(name="s3torchconnector", save=save, load=load, knob="throughput_target_gbps")


def _dcp_save(state: State, writer: Any) -> None:  # noqa: ANN401 - a storage writer
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, storage_writer=writer, no_dist=True)


def _dcp_load(state: State, reader: Any) -> object:  # noqa: ANN401 - a storage reader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, storage_reader=reader, no_dist=True)
    return state


def _dcp_fsspec() -> Way:
    """DCP over s3fs, with as many threads as connections (its reference: ``thread_count``, 1)."""

    def options(width: int | None) -> dict[str, Any]:
        return {} if width is None else {"config_kwargs": {"max_pool_connections": width}}

    def save(state: State, place: str, width: int | None) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        threads = width or 1
        _dcp_save(state, FsspecWriter(f"s3://{place}", thread_count=threads, **options(width)))

    def load_into(place: str, width: int | None, state: State) -> object:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return _dcp_load(state, FsspecReader(f"s3://{place}", **options(width)))

    return Way(name="DCP, fsspec", save=save, load_into=load_into, knob="thread_count", narrow=True)


def _dcp_connector() -> Way:
    """DCP over AWS's connector, whose README has 8 threads and the reader that is its default."""

    def options(width: int | None) -> dict[str, Any]:
        return {"region": _REGION, "s3client_config": _connector_config(width)}

    def save(state: State, place: str, width: int | None) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        where = f"s3://{place}/"
        _dcp_save(state, S3StorageWriter(path=where, thread_count=8, **options(width)))

    def load_into(place: str, width: int | None, state: State) -> object:
        from s3torchconnector.dcp import S3StorageReader

        return _dcp_load(state, S3StorageReader(path=f"s3://{place}/", **options(width)))

    return Way(
        name="DCP, s3torchconnector",
        save=save,
        load_into=load_into,
        knob="throughput_target_gbps",
        narrow=True,
    )


# --- ckptstore --------------------------------------------------------------------------------


def _ckptstore(codec: str) -> Way:
    def options(width: int | None) -> dict[str, Any]:
        return {} if width is None else {"requests": width}

    def begin(place: str) -> None:
        ckptstore.open(f"s3://{place}", create=True).close()

    def save(state: State, place: str, width: int | None) -> None:
        with ckptstore.open(f"s3://{place}", codec=codec, **options(width)) as store:
            store.run(_RUN).save(state, step=1)

    def load(place: str, width: int | None) -> object:
        with ckptstore.open(f"s3://{place}", read_only=True, **options(width)) as store:
            return store.load(f"{_RUN}@latest")

    def load_into(place: str, width: int | None, state: State) -> object:
        with ckptstore.open(f"s3://{place}", read_only=True, **options(width)) as store:
            return store.load(f"{_RUN}@latest", into=state)

    return Way(
        name=f"ckptstore {codec}",
        save=save,
        load=load,
        load_into=load_into,
        begin=begin,
        knob="requests",
    )


WAYS: Final = {
    way.name: way
    for way in (
        _boto3(),
        _s3fs(),
        _obstore(),
        _connector(),
        _dcp_fsspec(),
        _dcp_connector(),
        _ckptstore("raw"),
        _ckptstore("auto"),
    )
}
