"""What ``codec="auto"`` comes to in one save, and what the next one learns from it."""

from __future__ import annotations

from ckptstore.codecs.codec_table import CodecChoice, check_choice
from ckptstore.objects.auto_codec import SpeedSample
from ckptstore.objects.piece_writer import Written
from ckptstore.repo import Repo


def choose(repo: Repo, codec: str, *, workers: int) -> tuple[CodecChoice, dict[str, float]]:
    """Return the codec of a save, and what its receipt says of how it was chosen.

    Parameters
    ----------
    codec
        As the user wants it; only ``auto`` leaves a choice.
    workers
        Threads of the save.

    Raises
    ------
    InvalidInputError
        There is no such codec.
    """
    wanted = check_choice(codec)
    if wanted != "auto":
        return wanted, {}
    found = repo.pace.choose(workers=workers)
    return "planes" if found.planes else "raw", found.entries()


def learn(repo: Repo, choice: CodecChoice, written: Written, *, wall_s: float) -> None:
    """Remember what a save took; other codecs than raw and planes say nothing of these two."""
    if choice not in {"raw", "planes"}:
        return
    raw = written.table.raw[: len(written.is_new)].astype("int64")
    repo.pace.note(
        SpeedSample(
            planes=choice == "planes",
            total_bytes=int(raw.sum()),
            new_bytes=int(raw[written.is_new].sum()),
            stored_bytes=int(written.stored_new.sum()),
            wall_s=wall_s,
            hashing_s=written.seconds.get("hashing_s", 0.0),
            encoding_s=written.seconds.get("encoding_s", 0.0),
            storage_s=written.storage_s,
        )
    )
