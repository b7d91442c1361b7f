"""Measures the speed of a storage, for ``ckptstore doctor``; decides nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.config import SYSTEM, Environment
from ckptstore.errors import InvalidInputError
from ckptstore.events import Progress, ProgressCallback, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Throughput of one process."""

    bytes_moved: int
    """Written once and read once, in bytes."""
    write_bytes_per_s: float
    """One pack, durable."""
    read_bytes_per_s: float
    """The same pack in ranges, as many at once as the backend likes best; caches may help."""


def measure(
    backend: Backend,
    *,
    environment: Environment = SYSTEM,
    size_bytes: int = limits.MEASURE_BYTES,
    progress: ProgressCallback = silent,
) -> Speed:
    """Write and read an object of `size_bytes` incompressible bytes, remove it, return the speeds.

    Raises
    ------
    InvalidInputError
        `size_bytes` is more than ``MEASURE_BYTES_MAX``.
    StorageError
        The storage failed.
    """
    if size_bytes > limits.MEASURE_BYTES_MAX:
        msg = f"at most {limits.MEASURE_BYTES_MAX} bytes are written to measure, not {size_bytes}"
        raise InvalidInputError(msg, hint="64 MiB, the default, tells most; 1 GiB the rest")
    key = f"probe/{environment.random_hex(8)}-speed.pack"
    block = bytes.fromhex(environment.random_hex(limits.MIB))
    count = max(1, size_bytes // limits.MIB)
    try:
        start = environment.monotonic()
        with backend.open_writer(key) as writer:
            for index in range(count):
                writer.write(block)
                progress(Progress(stage="write", done=index * limits.MIB, total=size_bytes))
            writer.commit()
        written = environment.monotonic() - start
        start = environment.monotonic()
        with ThreadPoolExecutor(backend.capabilities.concurrency) as pool:
            step = 8 * limits.MIB
            total = count * limits.MIB
            for _ in pool.map(
                lambda o: _read(backend, key, o, min(step, total - o)), range(0, total, step)
            ):
                pass
        read = environment.monotonic() - start
    finally:
        backend.delete(key)
    return Speed(
        bytes_moved=total,
        write_bytes_per_s=total / max(written, 1e-9),
        read_bytes_per_s=total / max(read, 1e-9),
    )


def _read(backend: Backend, key: str, offset: int, size: int) -> None:
    backend.read_into(key, offset, [memoryview(bytearray(size))])
