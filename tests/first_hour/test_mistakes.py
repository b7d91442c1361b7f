"""Mistakes of a newcomer: each gives an error that names the place and the next step."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.errors import CkptStoreError
from tests.first_hour.conftest import Typed

IN_PYTHON = [
    # line; what the message names; what the hint says
    ("ckptstore.open('chekpoints')", "chekpoints", "create=True"),
    ("ckptstore.open('s4://bucket/ckpts')", "s4", "s3"),
    ("ckptstore.open('s3:/bucket/ckpts')", "s3:/", "s3://"),
    ("ckptstore.open('')", "empty", "CKPTSTORE_URL"),
    ("ckptstore.open(None)", "None", "such as"),
    ("ckptstore.open('model.pt')", "model.pt", "folder of a store"),
    ("ckptstore.open('outputs')", "outputs", "create=True"),
    ("ckptstore.open('ckpts', codec='gzip')", "gzip", "planes"),
    ("ckptstore.open('ckpts', workers='four')", "workers", "default"),
    ("ckptstore.open('ckpts', crate=True)", "crate", "leave it out"),
    ("ckptstore.Store('ckpts')", "ckpts", "ckptstore.open"),
    ("ckptstore.load('ckpts')", "'load'", "ckptstore.open"),
    ("store.save(state, step=1)", "'save'", "store.run("),
    ("store.run('my run')", "my run", "-"),
    ("store.run('gpt@140')", "gpt@140", "store.load"),
    ("store.run('gpt', metrics=['val_loss'])", "metrics", "'min'"),
    ("store.run('gpt', metrics={'val_loss': 'lower'})", "lower", "'min' or 'max'"),
    ("store.run('gpt', metrics={'val_loss': 'max'})", "val_loss", "name"),
    ("store.run('new', keep_best=3)", "keep_best", "metrics="),
    ("run.save(model, step=1)", "the state itself", "state_dict()"),
    ("run.save({'opt': optimizer}, step=1)", "'opt'", "state_dict()"),
    ("run.save({'sched': scheduler}, step=1)", "'sched'", "state_dict()"),
    ("run.save({'config': Config()}, step=1)", "'config'", "plain=True"),
    ("run.save({'f': {'g': lambda x: x}}, step=1)", "'f.g'", "leave it out"),
    ("run.save(state, step=1.5)", "1.5", "int(step)"),
    ("run.save(state, step='100')", "'100'", "int("),
    ("run.save(state, step=-1)", "-1", "count steps"),
    ("run.save(state, step=1, metrics={'loss': '0.5'})", "'loss'", "float("),
    ("run.save(state, step=1, metrics=0.5)", "metrics", "{'loss': 0.5}"),
    ("run.save(state, step=1, metrics={'loss': torch.ones(2)})", "'loss'", ".item()"),
    ("run.save(state, step=1, tags='release')", "tags", "['release']"),
    ("run.save(state, step=1, tags=['latest'])", "latest", "another name"),
    ("run.save(state, step=1, metadata={'m': model})", "metadata.m", "part of the state"),
    ("run.load(130)", "130", "120 and 140"),
    ("run.load('best')", "best", "best:val_loss"),
    ("run.load('best:loss')", "'loss'", "val_loss"),
    ("run.load('lastest')", "lastest", "latest"),
    ("store.load('gtp')", "gtp", "gpt"),
    ("store.load('gpt/140')", "gpt/140", "gpt"),
    ("store.load('gpt@-1')", "-1", "~1"),
    ("store.load(140)", "140", "run@140"),
    ("run.load(map_location='gpu')", "gpu", "cuda"),
    ("run.load(include=['modle.*'])", "modle.*", "model"),
    ("run.load(include='model')", "include", "['model']"),
    ("run.load(into=model)", "into", "state_dict()"),
    ("store.version('gpt')['model.0.wieght']", "wieght", "model.0.weight"),
    ("store.version('gpt')['model.0.weight'][99]", "99", "to 7"),
    ("store.version('gpt')['half'].numpy()", "bfloat16", "float()"),
    ("run.head.load()", "'load'", "store.load("),
    ("store['gpt@final']", "final", "release"),
    ("store.fork('gpt@140', 'lora')", "lora", "another name"),
    ("store.remove('gpt@100')", "refs", "['gpt@100']"),
    ("store.remove(['gpt@latest'])", "gpt@140", "force"),
    ("store.retain()", "policy", "last 3"),
    ("store.retain({'full': 'last three'})", "three", "last N"),
    ("run.rollback('best:val_los')", "val_los", "val_loss"),
    ("run.annotate(140, {})", "nothing", "val_loss"),
    ("files.import_file(store, 'pickled.pt', run='a', step=1)", "pickled.pt", "safetensors"),
    ("files.import_file(store, 'model.pt', run='a')", "model.pt", "step"),
    ("files.import_folder(store, 'ckpts', run='a')", "ckpts", "import_file"),
    ("store.from_pretrained('gpt')", "gpt", "model="),
    ("store.close() or store.load('gpt')", "closed", "open"),
]

IN_A_SHELL = [
    # line; what the message names; what the hint says
    ("ckptstore list", "list", "ckptstore ls"),
    ("ckptstore delete gpt@100", "delete", "ckptstore rm"),
    ("ckptstore save model.pt", "save", "import"),
    ("ckptstore lss", "lss", "ls"),
    ("ckptstore rename gpt gpt-small", "rename", "ckptstore fork"),
    ("ckptstore ls gtp", "gtp", "gpt"),
    ("ckptstore -s chekpoints ls", "chekpoints", "ckptstore init"),
    ("ckptstore show", "REF", "--help"),
    ("ckptstore show gpt@130", "130", "120 and 140"),
    ("ckptstore show gpt@best", "best", "best:val_loss"),
    ("ckptstore rm gpt", "gpt", "--run gpt"),
    ("ckptstore rm gpt@140", "gpt@140", "--force"),
    ("ckptstore tag gpt@140", "TAG", "--help"),
    ("ckptstore export gpt model.pt", "model.pt", ".safetensors"),
    ("ckptstore import nothing.pt gpt --step 1", "nothing.pt", "look in"),
    ("ckptstore import model.pt new", "model.pt", "--step"),
    ("ckptstore gc --dryrun", "--dryrun", "--dry-run"),
    ("ckptstore ls --where 'val_loss ~ 3'", "val_loss ~ 3", "val_loss<1.3"),
    ("ckptstore ls --sort val_los", "val_los", "val_loss"),
    ("ckptstore ls --limit ten", "--limit", "--help"),
    ("ckptstore retain", "policy", "last 3"),
    ("ckptstore annotate gpt@140 loss", "loss", "val_loss="),
    ("ckptstore log --metric val_loss", "RUN", "ckptstore log RUN"),
    ("ckptstore init ckpts", "ckpts", "open it"),
    ("ckptstore import outputs lora --tag a", "outputs", "--step"),
]


def test_there_are_enough_mistakes() -> None:
    """The two tables hold at least sixty, and no line twice."""
    lines = [row[0] for row in (*IN_PYTHON, *IN_A_SHELL)]
    assert len(set(lines)) == len(lines) >= 60


@pytest.mark.short(sample=10)
@pytest.mark.parametrize(("line", "place", "step"), IN_PYTHON, ids=lambda text: text[:50])
def test_a_mistake_in_python(names: dict[str, Any], line: str, place: str, step: str) -> None:
    """The line raises an error of ckptstore that names its place and the next step."""
    with pytest.raises(CkptStoreError) as caught:
        eval(line, names)  # noqa: S307 - a line of the table above
    assert place in caught.value.message
    assert step in caught.value.hint
    names["store"].close()


@pytest.mark.usefixtures("names")
@pytest.mark.short(sample=10)
@pytest.mark.parametrize(("line", "place", "step"), IN_A_SHELL, ids=lambda text: text[:50])
def test_a_mistake_in_a_shell(typed: Typed, line: str, place: str, step: str) -> None:
    """The command ends with an exit code, an error that names its place, and the next step."""
    code, out, err = typed(line)
    message, _, hint = err.partition("hint:")
    assert (code != 0, out, message[:6]) == (True, "", "error:")
    assert place in message
    assert step in hint or step in message.rpartition("Did you mean")[2]
