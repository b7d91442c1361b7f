"""Commits the files of a version to a repository of the Hugging Face Hub, with its own client."""

from __future__ import annotations

from collections.abc import Callable

from ckptstore.errors import CkptStoreError, InvalidInputError, StorageError, StoragePermissionError
from ckptstore.integrations.libraries import needed
from ckptstore.serving.model_file import opened_file
from ckptstore.serving.model_folder import ModelFolder

_DENIED = frozenset({401, 403})


def push_to_hub(
    folder: ModelFolder, place: str, *, private: bool, sent: Callable[[int], object]
) -> tuple[str, str]:
    """Commit all files at once; return the commit and its address. See :func:`push.push`."""
    hub, failures = needed("huggingface_hub"), needed("huggingface_hub.errors")
    name, _, branch = place.partition("@")
    version = folder.version
    api = hub.HfApi(library_name="ckptstore")
    files = [
        hub.CommitOperationAdd(
            path_in_repo=file.name,
            path_or_fileobj=file.content
            if isinstance(file.content, bytes)
            else opened_file(folder, file.name, sent),
        )
        for file in folder.files.values()
    ]
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if branch:
            api.create_branch(name, branch=branch, exist_ok=True)
        done = api.create_commit(
            name,
            files,
            commit_message=f"ckptstore: {version.label}",
            commit_description=f"version {version.id}, manifest blake3:{version.manifest_digest}",
            revision=branch or None,
        )
    except failures.HFValidationError as error:
        raise InvalidInputError(f"hf://{place}: {error}", hint="hf://OWNER/NAME") from error
    except Exception as error:  # of its client of HTTP, which has no common base
        raise _told(error, place) from error
    return done.oid, str(done.commit_url)


def _told(error: BaseException, place: str) -> CkptStoreError:
    """Return what a failure of the Hub's client is: its own errors are around those of reads."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, CkptStoreError):
            return found
        code = getattr(getattr(found, "response", None), "status_code", 0)
        if code in _DENIED:
            hint = "hf auth login, or HF_TOKEN with the right to write"
            return StoragePermissionError(f"hf://{place}: the Hub answers {code}", hint=hint)
        found = found.__cause__ or found.__context__
    said = " ".join(str(error).split())
    return StorageError(f"hf://{place}: {said:.300}", hint="run it again; is HF_ENDPOINT right?")
