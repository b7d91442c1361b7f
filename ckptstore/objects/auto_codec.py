"""Choice of ``codec="auto"``: compressed saves, unless encoding would slow down a fast storage."""

from __future__ import annotations

from ckptstore import limits
from ckptstore.config import CodecChoice


def auto_codec(write_bytes_per_s: float, *, workers: int) -> CodecChoice:
    """Return ``planes``, or ``raw`` where raw saves are so much faster that their size pays.

    A save takes as long as the slower of its threads and its storage. Compressed, it writes fewer
    bytes, and its threads encode besides the hashing.

    Parameters
    ----------
    write_bytes_per_s
        Durable bytes a second that the backend declares.
    workers
        Threads of the save.
    """
    raw = min(workers * limits.AUTO_HASH_BYTES_PER_S, write_bytes_per_s)
    encoding = workers * limits.AUTO_ENCODE_BYTES_PER_S
    return "planes" if encoding > limits.AUTO_RATIO * raw else "raw"
