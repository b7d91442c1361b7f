"""``ckptstore serve``: answer clients of the Hugging Face Hub and of S3 from a store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckptstore.backends.oserrors import translate
from ckptstore.catalog.retention_rules import parse_bytes
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import CommonOptions
from ckptstore.config import variable
from ckptstore.errors import InvalidInputError
from ckptstore.integrations.libraries import library


def serve(
    *,
    host: Annotated[str, typer.Option(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8765,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    max_shard_size: Annotated[str | None, typer.Option(metavar="BYTES")] = None,
    options: CommonOptions,
) -> None:
    """Serve every version as a model of the Hugging Face Hub and as files of S3; read-only.

    Stops at Ctrl-C or SIGTERM, after the downloads that are under way.

    Parameters
    ----------
    host
        The address to listen at; others than loopback need a token.
    port
        The port; 0 for any free one.
    token_file
        A file with the token that clients must send; or set CKPTSTORE_SERVE_TOKEN.
    tls_cert
        A certificate in PEM, for https.
    tls_key
        Its key.
    max_shard_size
        Largest file of weights, such as 4GiB; default: as save_pretrained.

    Examples
    --------
    ckptstore serve --store ckpts
    ckptstore serve --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem
    """
    with library("", "'ckptstore[serve]'"):
        from ckptstore.serving.http_server import serve as run
    from ckptstore.serving.versions import ServedVersions

    if (tls_cert is None) != (tls_key is None):
        raise InvalidInputError("a certificate needs its key", hint="--tls-cert and --tls-key")
    tls = None if tls_cert is None else (str(tls_cert), str(tls_key))
    output = options.output("serve")
    try:
        token = token_file.read_text().strip() if token_file else variable("CKPTSTORE_SERVE_TOKEN")
    except OSError as error:
        raise translate(error, f"reading {token_file}") from error
    shard_bytes = None if max_shard_size is None else parse_bytes(max_shard_size)

    def ready(url: str) -> None:
        """Print how to use the server."""
        hub, s3 = ("HF_TOKEN=TOKEN ", "AWS_SECRET_ACCESS_KEY=TOKEN ") if token else ("", "")
        output.tell(
            {"url": url},
            f"serving {options.store} at {url}, also for browsers; Ctrl-C stops",
            f"  HF_ENDPOINT={url} {hub}hf download store/RUN",
            f"  {s3}aws --endpoint-url {url} s3 ls s3://store/",
        )
        sys.stdout.flush()

    def log(line: str) -> None:
        """Print a line of the access log."""
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    with opened(options) as store:
        versions = ServedVersions(store, shard_bytes=shard_bytes)
        run(versions, host, port, token=token, tls=tls, log=log, ready=ready)
