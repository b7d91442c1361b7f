"""Values of a checkpoint of Orbax by their names, read by TensorStore when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from ckptstore.errors import FormatError
from ckptstore.integrations.libraries import needed
from ckptstore.integrations.pretrained_files import read_json
from ckptstore.tensors.foreign import KEY_DATA, KEY_IMPL, ForeignTensor, LateBytes

# Cache of nodes of an OCDBT. Source: Orbax itself takes as much.
_CONTEXT: Final = {"cache_pool": {"total_bytes_limit": 100_000_000}}


class _Array(msgspec.Struct):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


def values_of(folder: Path, *, driver: str, fills: bool) -> Callable[[str, str], Any]:
    """Return a function that gives the value of a name and kind: a tensor, a number, a text.

    Parameters
    ----------
    driver
        TensorStore's name of the format of arrays.
    fills
        Parts of arrays that are absent hold zeros; if not, they are missing.
    """
    tensorstore = needed("tensorstore", "'ckptstore[orbax]'")
    context = tensorstore.Context(_CONTEXT)
    base = {"driver": "file", "path": f"{folder.resolve()}/"}
    ocdbt = (folder / "manifest.ocdbt").is_file()
    implementations = _implementations(folder)

    def spec_of(name: str, kind: str) -> dict[str, Any]:
        """Return TensorStore's description of a value; raises FormatError for unsafe names."""
        if kind == "string":
            store = {**base, "path": f"{base['path']}_strings.json"}
            return {"driver": "json", "kvstore": store, "json_pointer": f"/{name}"}
        if not ocdbt and (name.startswith("/") or ".." in PurePosixPath(name).parts):
            raise FormatError(f"{folder} names the folder {name!r}")
        inside = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        return {
            "driver": driver,
            "kvstore": inside if ocdbt else {**base, "path": f"{base['path']}{name}/"},
            "fill_missing_data_reads": fills,
        }

    def value_of(name: str, kind: str) -> Any:
        """Return a value; the bytes of an array are read when they are needed."""

        def done(future: Any) -> Any:
            """Return a result of TensorStore."""
            try:
                return future.result()
            except (ValueError, OSError) as error:
                msg = f"{folder} has no sound array {name!r}: {error}"
                raise FormatError(msg, hint="did its save finish? else copy it again") from error

        found = done(tensorstore.open(spec_of(name, kind), open=True, read=True, context=context))
        if kind in ("scalar", "string"):
            return done(found.read()).item()
        late = LateBytes(lambda: done(found.read()))
        tensor = ForeignTensor(dtype=found.dtype.name, shape=tuple(found.shape), payload=late)
        implementation = implementations.get(name)
        return tensor if implementation is None else {KEY_IMPL: implementation, KEY_DATA: tensor}

    return value_of


def _implementations(folder: Path) -> dict[str, str]:
    """Return the implementations of typed PRNG keys by the names of their arrays."""
    found: dict[str, str] = {}
    for file in sorted((folder / "array_metadatas").glob("process_*")):
        listed = read_json(file, dict[str, list[dict[str, _Array]]])
        for one in (one for many in listed.values() for each in many for one in each.values()):
            if isinstance(implementation := (one.ext_metadata or {}).get("random_key_impl"), str):
                found[one.param_name] = implementation
    return found
