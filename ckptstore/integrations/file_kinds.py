"""Kinds of files by their first bytes: a suffix says little about a file that was downloaded."""

from __future__ import annotations

import codecs
import hashlib
import re
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

from ckptstore.errors import CkptStoreError, FormatError, InvalidInputError

HEAD_BYTES: Final = 1024
"""Bytes that tell a kind; the mark of a tar is the last, at 257."""
SAFETENSORS: Final = "a safetensors file"
ARCHIVE: Final = "a zip archive"
PICKLE: Final = "a pickle of torch.save"
OTHER_PICKLE: Final = "a pickle that torch.save did not write"
STATE: Final = "in the program that wrote it, save its tensors as safetensors or by torch.save"
_AGAIN: Final = "download it again, and look at the address, the login and the licence it asks for"
_ARRIVE: Final = "copy it again: its data did not arrive"
_READ: Final = "read it: it may tell why a download failed, or name the file to import"
_UNPACK: Final = "unpack it, and import what is in it"
_CONVERT: Final = "import weights in .safetensors, or of torch.save; convert them where needed"
_GGUF: Final = (
    "import the safetensors it was made from, or what transformers makes of it: "
    "AutoModel.from_pretrained(..., gguf_file=...)"
)


class Kind(NamedTuple):
    """A kind of files."""

    name: str
    hint: str


_KINDS: Final = (
    (rb"\Z", Kind("an empty file", _ARRIVE)),
    (rb"\0+\Z", Kind("a file that begins with zeros", _ARRIVE)),
    (rb"version https?://(git-lfs|hawser)", Kind("a Git LFS pointer, not the file itself",
                                                 "fetch the file: git lfs pull, or hf download")),
    (rb".{4}\0{4}\{", Kind(SAFETENSORS, _CONVERT)),
    (rb"PK(\x03\x04|\x05\x06)", Kind(ARCHIVE, _UNPACK)),
    (rb"\x80[\x01-\x05](\x95.{8})?\x8a\nl\xfc\x9cF\xf9", Kind(PICKLE, STATE)),
    (rb"\x80[\x01-\x05]", Kind(OTHER_PICKLE, STATE)),
    (rb"\x1f[\x8b\x9d]", Kind("a gzip file", _UNPACK)),
    (rb"\xfd7zXZ", Kind("an xz file", _UNPACK)),
    (rb"BZh\d", Kind("a bzip2 file", _UNPACK)),
    (rb"\x28\xb5\x2f\xfd", Kind("a zstd file", _UNPACK)),
    (rb"7z\xbc\xaf|Rar!|LZIP|\x04\x22\x4d\x18", Kind("a 7z, rar, lzip or lz4 file", _UNPACK)),
    (rb".{257}ustar", Kind("a tar archive", _UNPACK)),
    (rb"\x93NUMPY", Kind("a NumPy array (.npy)", "np.load it, and save it in a state")),
    (rb"\x89HDF\r\n", Kind("an HDF5 file, as Keras writes it", _CONVERT)),
    (rb"GGUF|lmgg|tjgg|fmgg", Kind("a GGUF file, whose weights are packed for inference", _GGUF)),
    (rb".{4}TFL3", Kind("a TensorFlow Lite model", _CONVERT)),
    (rb"\x08\x01[\x12\x22]", Kind("a TensorFlow model (SavedModel)", _CONVERT)),
    (rb"\x08[\x02-\x1f][\x12\x1a\x22\x2a\x3a\x42]", Kind("an ONNX model", _CONVERT)),
    (rb"%PDF|\x89PNG|\xff\xd8\xff|\x7fELF", Kind("a picture, document or program", _AGAIN)),
    (rb"[\s\xef\xbb\xbf]*<(\?xml|error)", Kind("an XML page, as of a server's error", _AGAIN)),
    (rb"[\s\xef\xbb\xbf]*(<!--.*?-->\s*)?<(!doctype|html|head|body)", Kind("an HTML page", _AGAIN)),
    (rb"[\s\xef\xbb\xbf]*[\[{]", Kind("a JSON text", _READ)),
)  # fmt: skip
_MEMBERS: Final = {
    "constants.pkl": Kind("a TorchScript program", "save the state_dict() of its model instead"),
    ".npy": Kind("an archive of NumPy arrays (.npz)", "np.load it, and save it as a state"),
    ".h5": Kind("a Keras model", _CONVERT),
    "/data.pkl": Kind(ARCHIVE, _UNPACK),
    "": Kind("a zip archive without a state", _UNPACK),
}
"""Kinds of zip archives by the ends of their members' names, in this order."""
_HARMLESS: Final = frozenset({"a text", "a JSON text", "an empty file"})


def kind_of(head: bytes) -> Kind | None:
    """Return the kind of a file by its first ``HEAD_BYTES``; None if they tell nothing."""
    for pattern, kind in _KINDS:
        if re.match(pattern, head, re.DOTALL | re.IGNORECASE):
            return kind
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeError:
        return None
    printable = all(char.isprintable() or char.isspace() for char in text)
    return Kind("a text", _READ) if printable else None


def read_kind(path: Path) -> Kind | None:
    """Return the kind of a file, of a zip archive by its members; raises OSError."""
    with path.open("rb") as file:
        found = kind_of(file.read(HEAD_BYTES))
    if found is None or found.name != ARCHIVE:
        return found
    try:
        with zipfile.ZipFile(path) as archive:
            names = [*archive.namelist(), ""]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return found  # the reader says what is wrong
    return next(kind for end, kind in _MEMBERS.items() if any(one.endswith(end) for one in names))


def refusal(path: Path, kind: Kind | None, *, named: bool) -> CkptStoreError:
    """Return the error for a file of another kind; `named` if its name promises a right one."""
    error = FormatError if named else InvalidInputError
    found = kind or Kind("of no kind that can be imported", _CONVERT)
    return error(f"{path} is {found.name}", hint=found.hint)


def check_beside(path: Path, data: bytes, *right: str) -> None:
    """Refuse a file that should be a text or of one of some kinds, by its first bytes.

    Raises
    ------
    FormatError
        It is a Git LFS pointer, a page of a server, a compressed file or the like.
    """
    kind = kind_of(data[:HEAD_BYTES])
    readme = path.suffix == ".md"  # may begin with HTML
    if kind and kind.name not in {*_HARMLESS, *right} and not (readme and "page" in kind.name):
        raise refusal(path, kind, named=True)


def check_blob(path: Path) -> None:
    """Compare a file in the cache of the Hugging Face hub with its name there, its SHA-256.

    Raises
    ------
    FormatError
        It is damaged.
    """
    blob = path.resolve()
    if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
        with blob.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != blob.name:
                msg = f"{path} has not the SHA-256 by which the hub names it"
                raise FormatError(msg, hint=f"delete {blob}, and download it again")
