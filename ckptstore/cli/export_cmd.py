"""``ckptstore export``: write a version as a safetensors file, or as a folder of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckptstore.cli.output import Output
from ckptstore.cli.session import find_version, give_replica, opened
from ckptstore.cli.store_options import CommonOptions, FromReplica, PathOptions, SourceOptions
from ckptstore.cli.text import bytes_text, counted, listed
from ckptstore.errors import ConflictError, InvalidInputError
from ckptstore.model import Version, naming

_NAMED = 5
"""Paths that the note about what was left out names."""


def export(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    path: Annotated[Path, typer.Argument(metavar="PATH")],
    *,
    paths: PathOptions,
    strip_prefix: Annotated[str, typer.Option(metavar="TEXT")] = "",
    pretrained: bool = False,
    merge: bool = False,
    max_shard_size: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    force: Annotated[bool, typer.Option("--force", "-f")] = False,
    deepspeed: Annotated[bool, typer.Option("--deepspeed")] = False,
    replica: FromReplica = None,
    source: SourceOptions,
    options: CommonOptions,
) -> None:
    """Write tensors to a safetensors file, or a model as a folder; every byte is checked.

    The file appears only when it is complete and on disk. Values that are not tensors are skipped,
    with a note. Evicted data is read from a replica.

    With --pretrained, PATH is a folder for from_pretrained of Transformers or PEFT: weights,
    configuration and tokenizer.

    Parameters
    ----------
    ref
        The version.
    path
        The file to write, NAME.safetensors; a folder with --pretrained or --deepspeed.
    strip_prefix
        Prefix to remove from tensor names: 'model.' for weights saved under model.
    pretrained
        Write a folder for from_pretrained.
    merge
        With --pretrained: add the version's adapter to the weights and write the whole model.
    max_shard_size
        With --pretrained: size of a file of weights, such as 5GB.
    force
        Replace an existing file, or an earlier export in a folder.
    deepspeed
        Write a universal checkpoint, for a version that was imported from one. DeepSpeed unpickles
        files in it: export versions that you trust.

    Examples
    --------
    ckptstore export gpt@best:val_loss model.safetensors --include 'model.*' --strip-prefix model.
    ckptstore export gpt@best:val_loss best-model --pretrained
    """
    output = options.output("export")
    if (merge or max_shard_size) and not pretrained:
        raise InvalidInputError("--merge and --max-shard-size go with --pretrained")
    chosen = paths.include or paths.exclude or strip_prefix
    if (pretrained and (chosen or deepspeed)) or (deepspeed and (chosen or force)):
        msg = "a folder holds a whole version, and is of one kind"
        raise InvalidInputError(msg, hint="leave the other options about its content out")
    with opened(options) as store, output.progress() as progress:
        give_replica(store, replica, source)
        version = find_version(store, ref)
        if pretrained:
            if path.is_dir() and any(path.iterdir()) and not force:
                msg = f"the folder {path} is not empty"
                hint = "name a new folder, or replace an export with --force"
                raise ConflictError(msg, hint=hint)
            from ckptstore.integrations.pretrained import export_pretrained

            shards: dict[str, Any] = {"max_shard_size": max_shard_size} if max_shard_size else {}
            made = export_pretrained(store, f"#{version.id}", path, merge=merge, **shards)
            _tell_folder(output, version, made)
            return
        if deepspeed:
            from ckptstore.integrations.deepspeed import export_universal

            _tell_folder(output, version, export_universal(store, f"#{version.id}", path))
            return
        from ckptstore.integrations.safetensors_stream import export_safetensors

        done = export_safetensors(
            store,
            f"#{version.id}",
            path,
            include=paths.include or None,
            exclude=paths.exclude or None,
            strip_prefix=strip_prefix,
            overwrite=force,
            progress=progress,
        )
    document = {
        "path": done.path,
        **naming(done.version),
        "tensors_count": done.tensors_count,
        "file_bytes": done.file_bytes,
        "left_out": done.left_out,
    }
    count, size = counted(done.tensors_count, "tensor"), bytes_text(done.file_bytes)
    output.tell(document, f"{done.path}: {count} of {done.version.run}@{done.version.step}, {size}")
    if done.left_out and not options.json:
        output.note(f"left out, since they are no tensors: {listed(done.left_out, most=_NAMED)}")


def _tell_folder(output: Output, version: Version, folder: Path) -> None:
    """Print what a folder holds."""
    files = sorted(path for path in folder.rglob("[!.]*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    names = [path.relative_to(folder).as_posix() for path in files]
    document = {"path": str(folder), **naming(version), "files": names, "file_bytes": size}
    text = f"{folder}: {counted(len(files), 'file')} of {version.run}@{version.step}"
    output.tell(document, f"{text}, {bytes_text(size)}")
