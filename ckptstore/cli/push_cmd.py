"""``ckptstore push``: copy a version to where models are shared."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import CommonOptions
from ckptstore.cli.text import bytes_text, counted


def push(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    *,
    dtype: Annotated[str, typer.Option(metavar="DTYPE")] = "",
    private: bool = False,
    options: CommonOptions,
) -> None:
    """Copy a version as a model to the Hugging Face Hub or into an OCI registry.

    The files are those of from_pretrained; they are made while they are sent, and checked. The
    version's id and digest go with them. Nothing shows there before all is sent.

    Parameters
    ----------
    ref
        The version.
    target
        hf://OWNER/NAME[@BRANCH] or oci://REGISTRY/NAME:TAG. Tokens are those of hf auth login (or
        HF_TOKEN) and docker login.
    dtype
        Cast the weights: bf16, fp16 or fp32.
    private
        Create a private repository on the Hub.

    Examples
    --------
    ckptstore push gpt@best:val_loss hf://team/gpt --dtype bf16
    ckptstore push gpt@release oci://registry.example.org/team/gpt:1.0
    """
    from ckptstore.serving.push import push as push_version

    output = options.output("push")
    with opened(options) as store, output.progress() as progress:
        named = f"#{find_version(store, ref).id}"
        done = push_version(store, named, target, dtype=dtype, private=private, progress=progress)
    count, size = counted(len(done.files), "file"), bytes_text(done.file_bytes)
    output.tell(asdict(done), f"{done.url}: {count} of {done.run}@{done.step}, {size}")
