"""Copies a version as a folder of files to the Hugging Face Hub or into an OCI registry.

The files are made from the pieces while they are sent, and read twice: their SHA-256 comes first.
What the target has already is not sent again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckptstore.errors import InvalidInputError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.model import NamedVersion, naming
from ckptstore.serving.model_folder import ModelFolder, parse_dtype
from ckptstore.serving.versions import ServedVersions
from ckptstore.store import Store

_FORMS = "hf://OWNER/NAME[@BRANCH] or oci://REGISTRY/NAME:TAG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed(NamedVersion):
    """A version that was pushed."""

    target: str
    digest: str
    """The commit of the Hub, or the digest of the artifact's manifest."""
    url: str
    files: tuple[str, ...]
    file_bytes: int


def push(
    store: Store,
    ref: str,
    target: str,
    *,
    dtype: str = "",
    private: bool = False,
    progress: ProgressCallback = silent,
) -> Pushed:
    """Copy a version, with its id and the digest of its manifest, to where models are shared.

    Parameters
    ----------
    ref
        Names the version.
    target
        ``hf://OWNER/NAME``, with ``@BRANCH`` for a branch other than ``main``; the endpoint and
        the token are those of huggingface_hub (``HF_ENDPOINT``, ``HF_TOKEN``). Or
        ``oci://REGISTRY/NAME:TAG``; credentials are those of ``docker login``, and a registry on
        this machine is asked without TLS.
    dtype
        Cast floats: ``bf16``, ``fp16`` or ``fp32``.
    private
        A repository of the Hub that is created is private.
    progress
        Called with the bytes of weights that were read; what is sent is read twice.

    Raises
    ------
    InvalidInputError
        The target is no such URL.
    MissingDependencyError
        huggingface_hub or oras is not installed.
    StoragePermissionError, StorageError
        The target refused, or cannot be reached. What was sent until then is not shown.
    CkptStoreError
        The version cannot be read: nothing is shown.
    """
    scheme, _, place = target.partition("://")
    if not {"hf": place.count("/") == 1, "oci": "/" in place}.get(scheme):
        raise InvalidInputError(f"{target!r:.200} is no place to push to", hint=_FORMS)
    folder = ServedVersions(store).folder(f"{ref}?dtype={parse_dtype(dtype)}" if dtype else ref)
    sent = _counted(folder, progress)
    if scheme == "hf":
        from ckptstore.serving.hub_push import push_to_hub

        digest, url = push_to_hub(folder, place, private=private, sent=sent)
    else:
        from ckptstore.serving.oci_push import push_to_registry

        digest, url = push_to_registry(folder, place, sent=sent)
    return Pushed(
        **naming(folder.version),
        target=target,
        digest=digest,
        url=url,
        files=tuple(folder.files),
        file_bytes=sum(file.nbytes for file in folder.files.values()),
    )


def _counted(folder: ModelFolder, progress: ProgressCallback) -> Callable[[int], None]:
    """Return what adds up the bytes that were read, from any thread."""
    files = folder.files.values()
    total = 2 * sum(file.nbytes for file in files if not isinstance(file.content, bytes))
    lock, done = threading.Lock(), 0

    def sent(count: int) -> None:
        """Count bytes that were read, or sent."""
        nonlocal done
        with lock:
            done = min(total, done + count)
            progress(Progress(stage="push", done=done, total=total))

    return sent
