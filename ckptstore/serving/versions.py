"""Finds versions and their folders by refs and paths; reads the catalog again at a bounded rate."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from urllib.parse import parse_qs

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.refs import parse_ref, resolve
from ckptstore.errors import InvalidRefError, VersionNotFoundError
from ckptstore.model import Version
from ckptstore.serving.model_folder import ModelFolder, open_folder, parse_dtype, split_commit
from ckptstore.serving.serving_limits import FOLDER_BYTES_KEPT, FOLDERS_KEPT, REFRESH_S
from ckptstore.store import Store


class ServedVersions:
    """The versions of a store as folders. Any thread may use it.

    Parameters
    ----------
    shard_bytes
        Largest file of weights; None for the default of ``save_pretrained``.
    """

    def __init__(self, store: Store, *, shard_bytes: int | None = None) -> None:
        self.store = store
        self._shard_bytes = shard_bytes
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._valid: dict[str, tuple[int, Version]] = {}
        self._folders: OrderedDict[object, ModelFolder] = OrderedDict()

    def catalog(self) -> Catalog:
        """Return the catalog, at most ``REFRESH_S`` old.

        Raises
        ------
        CkptStoreError
            As :meth:`ckptstore.repo.Repo.refresh`.
        """
        repo = self.store.repo
        with self._lock:
            if repo.environment.monotonic() - self._read_at > REFRESH_S:
                repo.refresh()
                self._read_at = repo.environment.monotonic()
        return repo.catalog

    def runs(self) -> list[str]:
        """Return the names of the runs that have versions, sorted."""
        return sorted(run.name for run in self.catalog().runs() if run.versions_count)

    def find(self, ref: str, *, run: str = "") -> tuple[Version, str]:
        """Return the version of a ref, and the dtype behind its ``?dtype=``.

        Parameters
        ----------
        run
            For a relative ref.

        Raises
        ------
        InvalidRefError, RunNotFoundError, VersionNotFoundError
            It names no version.
        """
        text, _, query = ref.partition("?")
        wishes = parse_qs(query, keep_blank_values=True)
        if query and list(wishes) != ["dtype"]:
            raise InvalidRefError(f"{ref!r:.200}: only dtype can follow the ?")
        dtype = parse_dtype(wishes["dtype"][-1]) if query else ""
        catalog, commit = self.catalog(), split_commit(text)
        if commit is not None:
            return resolve(catalog, parse_ref(f"#{commit[0]}")), dtype or commit[1]
        parsed = parse_ref(text, run=run)
        if parsed.kind == "valid":  # reads every byte: once for each state of the log
            known = self._valid.get(parsed.run)
            if known is None or known[0] != catalog.number:
                known = (catalog.number, self.store.resolve(f"{parsed.run}@latest-valid"))
                self._valid[parsed.run] = known
            return known[1], dtype
        return resolve(catalog, parsed), dtype

    def folder(self, ref: str, *, run: str = "") -> ModelFolder:
        """Return the files of the version of a ref; see :meth:`find`.

        Raises
        ------
        CkptStoreError
            As :meth:`find`, and :func:`ckptstore.serving.model_folder.open_folder`.
        """
        version, dtype = self.find(ref, run=run)
        # A manifest is written anew where a collection moved its pieces.
        shown = repr((version.level, version.metrics, version.tags))
        key = (version.id, version.manifest_digest, dtype, shown)
        found = self._folders.get(key)
        if found is None:
            found = open_folder(self.store, version, dtype=dtype, shard_bytes=self._shard_bytes)
        with self._lock:
            self._folders[key] = found
            self._folders.move_to_end(key)
            while len(self._folders) > 1 and (
                len(self._folders) > FOLDERS_KEPT or self._held() > FOLDER_BYTES_KEPT
            ):
                self._folders.popitem(last=False)
        return found

    def _held(self) -> int:
        files = (file for folder in self._folders.values() for file in folder.files.values())
        return sum(file.nbytes for file in files if isinstance(file.content, bytes))

    def below(self, run: str, parts: Sequence[str]) -> tuple[ModelFolder, str, str]:
        """Return folder, relative ref and rest of a path in a run; tags may hold slashes.

        Of the refs that it begins with: the longest whose folder holds the rest, or the longest.

        Raises
        ------
        VersionNotFoundError, InvalidRefError
            No beginning of the path is a ref of the run.
        """
        failure: Exception = VersionNotFoundError(f"no ref of run {run!r} is given")
        longest: tuple[ModelFolder, str, str] | None = None
        for count in range(len(parts), 0, -1):
            ref, rest = "/".join(parts[:count]), "/".join(parts[count:])
            try:
                folder = self.folder(ref, run=run)
            except (VersionNotFoundError, InvalidRefError) as error:
                failure = error
                continue
            longest = longest or (folder, ref, rest)
            if not rest or rest in folder.files or folder.below(rest):
                return folder, ref, rest
        if longest is None:
            raise failure
        return longest

    def split(self, parts: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield each run that a path begins with, and the rest of the path."""
        catalog = self.catalog()
        for count in range(1, len(parts) + 1):
            run = "/".join(parts[:count])
            if catalog.has_run(run):
                yield run, parts[count:]

    def refs(self, run: str) -> list[str]:
        """Return relative refs that name versions of a run: latest, best, tags, steps.

        Raises
        ------
        RunNotFoundError
            There is no such run.
        """
        catalog = self.catalog()
        info = catalog.run(run)
        steps = {str(step) for step in catalog.steps(run)}
        best = {f"best:{name}" for name in info.metrics if name in catalog.metric_names(run)}
        return sorted({"latest", *info.tags, *best, *steps})
