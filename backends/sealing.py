r"""The cryptography of encrypted stores: derivation of keys, and sealed segments.

Everything is built on HKDF-SHA256 and AES-256-GCM of the package ``cryptography``, imported
when the first key is used. Keys are held by objects that do not show them: not in a ``repr``, not
in an error. A user's key cannot be pickled; a store's data key can, since workers need it.

::

    user's key --HKDF(info="ckptstore key id v1")-----------------------> id, 8 bytes, public
    user's key --HKDF(salt of the slot, info="ckptstore key wrap v1")---> wraps the data key
    data key   --HKDF(salt=store id, info="ckptstore key check v1")-----> check, 16 bytes, public
    data key   --HKDF(salt=store id, info=text of a record of keys)-----> its seal, 32 bytes
    data key   --HKDF(salt of the object, info="ckptstore object v1\n" + its key)--> object's key
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final, NoReturn

from ckptstore import errors
from ckptstore.format.encryption import KeyRecord, KeySlot, sealed_text, wrapping_context
from ckptstore.format.segments import MAGIC, SALT_BYTES, nonce

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from ckptstore.backends.base import Buffer

KEY_BYTES: Final = 32
_SEAL_BYTES: Final = 32

_ID: Final = b"ckptstore key id v1"
_WRAP: Final = b"ckptstore key wrap v1"
_CHECK: Final = b"ckptstore key check v1"
_OBJECT: Final = b"ckptstore object v1\n"
_WRAP_NONCE: Final = bytes(12)  # a wrapping key is used once: its salt is the slot's own


class UserKey:
    """The key that a user keeps; it wraps the data key of a store and does nothing else.

    Raises
    ------
    EncryptionKeyError
        It does not have 32 bytes, or all of them are equal.
    """

    __slots__ = ("_material", "id")

    def __init__(self, material: bytes) -> None:
        self.id: str = ""
        """Says which key it is, and tells nothing of it."""
        if len(material) != KEY_BYTES:
            msg = f"a key has {KEY_BYTES} bytes, not {len(material)}"
            raise errors.EncryptionKeyError(msg, hint="ckptstore key new FILE makes one")
        if len(set(material)) == 1:
            msg = "a key must not consist of equal bytes"
            raise errors.EncryptionKeyError(msg, hint="ckptstore key new FILE makes one")
        self._material = bytes(material)
        self.id = _derive(self._material, b"", _ID, 8).hex()

    def wrapping(self, salt: bytes) -> AESGCM:
        """Return the cipher that wraps a data key in the slot of this salt."""
        return _cipher(_derive(self._material, salt, _WRAP, KEY_BYTES))

    def __repr__(self) -> str:
        return f"<key {self.id}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be sent to another process")


class DataKey:
    """The key of one store, random and never changed. Pickled with the backend that uses it."""

    __slots__ = ("_material",)

    def __init__(self, material: bytes) -> None:
        self._material = bytes(material)

    def check(self, store_id: str) -> str:
        """Return the key's check value, which the superblock of a store holds."""
        return _derive(self._material, bytes.fromhex(store_id), _CHECK, 16).hex()

    def seal_of(self, record: KeyRecord) -> str:
        """Return the seal of a record of keys; ignores the seal that it holds."""
        salt = bytes.fromhex(record.store_id)
        return _derive(self._material, salt, sealed_text(record), _SEAL_BYTES).hex()

    def sealer(self, key: str, salt: bytes) -> Sealer:
        """Return the sealer of one object's segments."""
        material = _derive(self._material, salt, _OBJECT + key.encode(), KEY_BYTES)
        return Sealer(_cipher(material), key, salt)

    def wrapped_by(self, cipher: AESGCM, context: bytes) -> bytes:
        """Return the key, wrapped."""
        return cipher.encrypt(_WRAP_NONCE, self._material, context)

    def __repr__(self) -> str:
        return "<data key>"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._material,)


class Sealer:
    """Seals and opens the segments of one object; any thread may use it."""

    __slots__ = ("_cipher", "header", "key")

    def __init__(self, cipher: AESGCM, key: str, salt: bytes) -> None:
        self._cipher = cipher
        self.key: str = key
        self.header: bytes = MAGIC + salt
        """First bytes of the object."""

    def seal(self, index: int, data: Buffer, *, last: bool) -> bytes:
        """Return a segment, encrypted; each index is sealed once."""
        return self._cipher.encrypt(nonce(index, last=last), data, None)

    def open(self, index: int, data: Buffer, *, last: bool) -> bytes:
        """Return a segment, decrypted.

        Raises
        ------
        CorruptObjectError
            The bytes were not sealed as this segment of this object.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(nonce(index, last=last), data, None)
        except InvalidTag:
            raise self._refusal(index) from None

    def open_into(self, index: int, data: Buffer, out: memoryview, *, last: bool) -> None:
        """Decrypt a segment into `out`, whose contents are undefined after an error.

        Raises
        ------
        CorruptObjectError
            As :meth:`open`.
        """
        from cryptography.exceptions import InvalidTag

        into = getattr(self._cipher, "decrypt_into", None)  # since cryptography 46
        if into is None:
            out[:] = self.open(index, data, last=last)
            return
        try:
            into(nonce(index, last=last), data, None, out)
        except InvalidTag:
            raise self._refusal(index) from None

    def _refusal(self, index: int) -> errors.CorruptObjectError:
        return errors.CorruptObjectError(
            f"{self.key} does not decrypt in segment {index}: it was changed or cut off, or is "
            "another object's"
        )


def salt_of(header: bytes | bytearray | memoryview, *, where: str) -> bytes:
    """Return the salt in the header of an object.

    Raises
    ------
    CorruptObjectError
        `header` is no header of an encrypted object.
    """
    found = bytes(header)
    if len(found) != len(MAGIC) + SALT_BYTES or not found.startswith(MAGIC):
        msg = f"{where} is not encrypted, though its store is: ckptstore did not write it here"
        raise errors.CorruptObjectError(msg)
    return found[len(MAGIC) :]


def wrap(record: KeyRecord, data_key: DataKey, user_key: UserKey, salt: bytes) -> KeySlot:
    """Return a slot by which a user's key opens the data key of a record.

    Parameters
    ----------
    salt
        32 random bytes, used for this slot alone.
    """
    context = wrapping_context(record, user_key.id, sealed=True)
    wrapped = data_key.wrapped_by(user_key.wrapping(salt), context)
    return KeySlot(key=user_key.id, salt=salt.hex(), wrapped=wrapped.hex(), sealed=True)


def unwrap(
    record: KeyRecord, user_key: UserKey, *, where: str, place: str = "the store"
) -> DataKey:
    """Return the data key of a store.

    Raises
    ------
    WrongKeyError
        No slot belongs to this key.
    CorruptObjectError
        A slot does but does not open; or the key in it is not the record's; or the record's seal
        belongs to another record, such as one with another number.
    """
    from cryptography.exceptions import InvalidTag

    slots = [slot for slot in record.slots if slot.key == user_key.id]
    if not slots:
        known = ", ".join(slot.key for slot in record.slots)
        msg = f"{place} is encrypted with another key: it wants {known}, not {user_key.id}"
        raise errors.WrongKeyError(msg, hint="ckptstore key id --key SPEC says which key one is")
    for slot in slots:
        cipher = user_key.wrapping(bytes.fromhex(slot.salt))
        context = wrapping_context(record, user_key.id, sealed=slot.sealed)
        try:
            # No local variable holds the bytes: tools that report errors print local variables.
            found = DataKey(cipher.decrypt(_WRAP_NONCE, bytes.fromhex(slot.wrapped), context))
        except InvalidTag:
            continue
        if not hmac.compare_digest(found.check(record.store_id), record.encryption.check):
            continue
        if record.seal and not hmac.compare_digest(found.seal_of(record), record.seal):
            msg = f"{where} was changed, or is another record under this name: its seal is not its"
            raise errors.CorruptObjectError(msg, hint="restore keys/ from a backup")
        return found
    msg = f"{where} was changed: its slot of the key {user_key.id} does not open"
    raise errors.CorruptObjectError(msg, hint="restore keys/ from a backup")


def _derive(material: bytes, salt: bytes, info: bytes, count: int) -> bytes:
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        msg = f"encryption needs a package that is not installed ({error.name})"
        hint = "pip install 'ckptstore[encryption]'"
        raise errors.MissingDependencyError(msg, hint=hint) from error
    return HKDF(algorithm=SHA256(), length=count, salt=salt or None, info=info).derive(material)


def _cipher(material: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(material)
