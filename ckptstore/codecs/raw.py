"""The chunk as it is. On a fast disk the quickest codec; read straight into the tensor."""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore.codecs.codec import CodecError, Part
from ckptstore.codecs.plane_layout import Layout


class Raw:
    """Stores a chunk unchanged."""

    code = 0
    name = "raw"

    def encode(self, raw: memoryview, layout: Layout) -> Sequence[Part]:
        """Return the chunk itself."""
        del layout
        return (raw,)

    def decode(self, stored: memoryview, layout: Layout, out: memoryview) -> None:
        """Copy; see :class:`ckptstore.codecs.codec.Codec`."""
        del layout
        if len(stored) != len(out):
            msg = f"raw chunk of {len(stored)} bytes where {len(out)} are due"
            raise CodecError(msg)
        out[:] = stored
