"""Clients that save to S3 and load from it over many connections, each as its own docs advise.

Every client gets the width, the number of connections, by an option of its own where it has one,
and parts of 8 MiB where it lets one choose, so that all widths can be used. Rows of a client and of
bytes only move bytes, which are ready in memory, and make no state of them; their clients are made
before the clock starts. The others save and load a state. Bodies are not signed where a client can
leave that out: the server stands for one behind TLS, where none of them signs bodies.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch

import ckptstore
from benchmarks.byte_one import CRT
from benchmarks.states import State, flat_tensors
from ckptstore.backends.s3_calls import read_settings
from ckptstore.backends.s3_direct import direct_client

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
    load_into: Callable[[str, int | None, Any], object] | None = None
    """Gets the tensors of a state, or memory for its bytes."""
    plain: bool = False
    """True if only bytes are moved: it saves bytes, and loads parts of them, in order."""
    knob: str = ""
    """The option that limits the connections; empty without one."""
    begin: Callable[[str], None] = lambda _: None
    """Makes what exists before the first save of a training."""
    narrow: tuple[str, ...] = ()
    """``save`` and ``load`` if they use one connection or two, whatever the width."""


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


def _client(name: str, *, short: bool) -> Way:
    """Client of ckptstore's backend alone: PUTs and ranged GETs of 8 MiB, by threads.

    It sends from memory, and receives into given memory.

    Parameters
    ----------
    short
        Requests take the short path (docs/design/0014); else botocore's client sends them all.
    """

    @cache
    def made() -> Any:  # noqa: ANN401 - of the backend
        settings = read_settings({})
        assert settings is not None  # noqa: S101 - no options: all are known
        calls = direct_client(settings)
        if not short:
            calls._thin = None
        return calls

    def each(place: str, width: int | None, size: int, work: Callable[..., None]) -> None:
        bucket, prefix = _split(place)

        def one(at: int) -> None:
            request = {"Bucket": bucket, "Key": f"{prefix}/{at}"}
            work(request, slice(at, min(at + _PART, size)))

        with ThreadPoolExecutor(width or 16) as pool:
            list(pool.map(one, range(0, size, _PART)))

    def save(data: bytes, place: str, width: int | None) -> None:
        view = memoryview(data)

        def put(request: dict[str, Any], span: slice) -> None:
            made().send("put_object", request, [view[span]])

        each(place, width, len(data), put)

    def load_into(place: str, width: int | None, memory: bytearray) -> object:
        view = memoryview(memory)

        def get(request: dict[str, Any], span: slice) -> None:
            request["Range"] = f"bytes=0-{span.stop - span.start - 1}"
            made().read_into(request, [view[span]], lambda _: None)

        each(place, width, len(memory), get)
        return [memory]

    return Way(name=name, save=save, load_into=load_into, plain=True, knob="threads")


def _boto3() -> Way:
    """boto3's transfers.

    Its guide, "File transfer configuration": raise ``max_concurrency`` (10) for more bandwidth;
    botocore's ``max_pool_connections`` (10) has to follow, and, for bytes in memory,
    s3transfer's ``max_in_memory_upload_chunks`` (10).
    """

    @cache
    def made(width: int | None) -> tuple[Any, Any]:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        unsigned = {"payload_signing_enabled": False}
        if width is None:
            classic = TransferConfig(preferred_transfer_client="classic")
            return boto3.client("s3", config=Config(s3=unsigned)), classic
        config = Config(max_pool_connections=width, s3=unsigned)
        transfer = TransferConfig(max_concurrency=width, preferred_transfer_client="classic")
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


def _boto3_crt() -> Way:
    """boto3's other transfers, by AWS's common runtime (``pip install awscrt``).

    The runtime has a rate to reach in place of a number of connections. boto3 itself makes its
    client for TLS and AWS's own endpoints alone; here it is made as boto3 does, for this endpoint.
    """

    @cache
    def made(width: int | None) -> Any:  # noqa: ANN401 - s3transfer's
        from botocore.config import Config
        from botocore.session import Session
        from s3transfer import crt

        session = Session()
        provider = crt.BotocoreCRTCredentialsWrapper(session.get_credentials())
        rate = None if width is None else int(width * _GBPS_OF_A_CONNECTION * 1e9 / 8)
        client = crt.create_s3_crt_client(
            _REGION, provider.to_crt_credentials_provider(), use_ssl=False, target_throughput=rate
        )
        settings = {
            "region_name": _REGION,
            "endpoint_url": _endpoint(),
            "config": Config(s3={"addressing_style": "path"}),
        }
        return crt.CRTTransferManager(client, crt.BotocoreCRTRequestSerializer(session, settings))

    def save(data: bytes, place: str, width: int | None) -> None:
        bucket, key = _split(place)
        made(width).upload(io.BytesIO(data), bucket, key).result()

    def load(place: str, width: int | None) -> object:
        bucket, key = _split(place)
        buffer = io.BytesIO()
        made(width).download(bucket, key, buffer).result()
        return [buffer.getbuffer()]

    knob = "target_throughput"
    return Way(name=CRT, save=save, load=load, plain=True, knob=knob)


def _s3fs() -> Way:
    """s3fs.

    Its reference of ``S3FileSystem``: ``max_concurrency`` (10) is the number of transfers of one
    file; the pool of connections is botocore's, as for boto3. Chunks of 50 MiB, its default, would
    be 20 for a GB.
    """

    @cache
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

    @cache
    def made_for(bucket: str) -> Any:  # noqa: ANN401 - obstore's
        from obstore.store import S3Store

        options: Any = {"allow_http": True, "timeout": timedelta(minutes=5)}
        return S3Store(
            bucket,
            endpoint=_endpoint(),
            region=_REGION,
            unsigned_payload=True,
            client_options=options,
        )

    def made(place: str) -> tuple[Any, str]:
        bucket, key = _split(place)
        return made_for(bucket), key

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

    return Way(
        name="DCP, fsspec", save=save, load_into=load_into, knob="thread_count", narrow=("load",)
    )


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
        narrow=("load",),
    )


def _moonclip() -> Way:
    """moonclip, by way of a folder: it saves there and copies that to S3, one file at a time."""
    folders: list[tempfile.TemporaryDirectory[str]] = []  # until the process ends

    def made(place: str) -> Any:  # noqa: ANN401 - moonclip's
        from moonclip import MoonclipManager

        bucket, prefix = _split(place)
        folders.append(tempfile.TemporaryDirectory())
        return MoonclipManager(
            folders[-1].name,
            s3_bucket=bucket,
            s3_prefix=prefix,
            s3_endpoint=_endpoint(),
            async_save=False,
        )

    def save(state: State, place: str, _: int | None) -> None:
        from moonclip import flatten_state_dict

        manager = made(place)
        manager.save_tensors(1, flatten_state_dict(state, "state", as_tensors=True)[0])
        manager.sync_now()

    def load(place: str, _: int | None) -> object:
        from moonclip import unflatten_state_dict

        manager = made(place)
        manager.restore_from_remote()
        return unflatten_state_dict(manager.load_latest()[1])["state"]

    return Way(name="moonclip", save=save, load=load, narrow=("save", "load"))


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
        _client("ckptstore's client, short path", short=True),
        _client("ckptstore's client, library's path", short=False),
        _boto3(),
        _boto3_crt(),
        _s3fs(),
        _obstore(),
        _connector(),
        _dcp_fsspec(),
        _dcp_connector(),
        _moonclip(),
        _ckptstore("raw"),
        _ckptstore("auto"),
    )
}
