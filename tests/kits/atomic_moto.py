"""moto's S3 with one write at a time, run as ``python atomic_moto.py PORT``.

moto checks whether an object exists and writes it later, without a lock in between: now and then
two conditional writes win. AWS promises that only one does, so here a lock makes moto keep that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple

_MOTO = DomainDispatcherApplication(create_backend_app)
_WRITING = threading.Lock()


def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:  # noqa: ANN401
    """Pass reads on at once, and writes one after another, their bodies included."""
    if environ["REQUEST_METHOD"] in {"GET", "HEAD"}:
        answer: Iterable[bytes] = _MOTO(environ, start_response)
        return answer
    with _WRITING:
        return list(_MOTO(environ, start_response))


if __name__ == "__main__":
    run_simple(
        "127.0.0.1", int(sys.argv[1]), application, threaded=True,
        request_handler=MotoRequestHandler,
    )  # fmt: skip
