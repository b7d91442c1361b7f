"""Guesses of a newcomer at names and habits: each one works as it reads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.first_hour.conftest import Typed

IN_PYTHON = [
    "len(store) == 2",
    "'gpt' in store and 'bert' not in store",
    "'gpt@best:val_loss' in store",
    "[run.name for run in store] == ['gpt', 'lora']",
    "store['gpt'].name == 'gpt'",
    "store['gpt@best:val_loss'].step == 120",
    "[version.step for version in run] == [100, 120, 140]",
    "len(run) == 3 and 140 in run and 130 not in run",
    "run[140].metrics['val_loss'] == 1.5",
    "run['best:val_loss'].step == run['release'].step == 120",
    "run['latest'].step == run.head.step == 140",
    "run.load(140)['model'].keys() == model.state_dict().keys()",
    "run.load()['model'].keys() == model.state_dict().keys()",
    "not model.load_state_dict(run.load('latest')['model']).missing_keys",
    "optimizer.load_state_dict(run.load('latest')['optimizer']) is None",
    "store.load('gpt@140', map_location='cpu')['half'].dtype == torch.bfloat16",
    "store.load('gpt@140', map_location=torch.device('cpu'), include=['half']).keys() == {'half'}",
    "list(store.load('gpt', include=['model'])) == ['model']",
    "store.load('gpt@~1')['half'].shape == (3,)",
    "store.load('#' + run.head.id[:8])['half'].shape == (3,)",
    "len(ckptstore.open(Path('ckpts'))) == 2",
    "len(ckptstore.open('./ckpts')) == 2",
    "len(ckptstore.open('~/ckpts')) == 2",
    "len(ckptstore.open(folder / 'ckpts')) == 2",
    "len(ckptstore.open(f'file://{folder}/ckpts')) == 2",
    "len(ckptstore.open('ckpts', create=True)) == 2",
    "len(ckptstore.open('new/deep/folder', create=True)) == 0",
    "run.save(state, 150).step == 150",
    "run.save(state, step=np.int64(150)).step == 150",
    "run.save(state, step=torch.tensor(150)).step == 150",
    "run.save(state, step=150, metrics={'val_loss': np.float32(0.5)}).metrics['val_loss'] == 0.5",
    "run.save(state, step=150, metrics={'val_loss': torch.tensor(0.5)}).metrics['val_loss'] == 0.5",
    "run.save(state, 150, metrics={'val_loss': float('nan')}); run['best:val_loss'].step == 120",
    "run.save(state, step=150, metrics={'train/loss': 1, 'acc@1': 0.5}).metrics['train/loss'] == 1",
    "run.save(state, step=150, tags=['final']) and run['final'].step == 150",
    "run.save(state, step=140).step == 140 and len(run) == 4",
    "run.save(model.state_dict(), step=150) and run.load()['0.weight'].shape == (8, 4)",
    "run.save([1, {'a.b': {1: 'x', (2, 3): None}}], step=150); run.load()[1]['a.b'][1] == 'x'",
    "run.save(torch.ones(3), step=150) and run.load().sum() == 3",
    "r = np.random.get_state(); run.save({'rng': r}, step=150); run.load()['rng'][1][0] == r[1][0]",
    "r = torch.get_rng_state(); run.save({'r': r}, 150); r.equal(run.load()['r'])",
    "run.save({'c': Config()}, 150, plain=True); run.load() == {'c': {'lr': 0.1, 'mode': 'train'}}",
    "a = argparse.Namespace(lr=1); run.save(a, 150, plain=True); run.load() == {'lr': 1}",
    "run.save_async(state, step=150).result().step == 150",
    "few = store.run('few', keep_last=2); [few.save(state, n) for n in range(4)]; len(few) == 2",
    "top = store.run('top', metrics={'acc': 'max'}, keep_best=1);"
    " [top.save(state, n, metrics={'acc': n % 3}) for n in range(5)];"
    " [v.step for v in top] == [2, 4]",
    "t = torch.zeros(3).bfloat16(); run.load(into={'half': t}, include=['half']); t.sum() == 3",
    "not run.load_into('latest', {'model': model}, include=['model']).missing",
    "'model.0.weight' in store.version('gpt') and len(store.version('gpt').keys()) > 4",
    "store['gpt@140']['model.0.weight'][:2].shape == (2, 4)",
    "torch.as_tensor(run[140]['model.0.weight']).equal(run.load(140)['model']['0.weight'])",
    "torch.as_tensor(run[140]['half']).dtype == torch.bfloat16",
    "w = run[140]['model.0.weight']; np.asarray(w).shape == w.numpy().shape == (8, 4)",
    "run.best('val_loss')[0].step == 120",
    "run.tag('best:val_loss', 'champion').tags == ('champion', 'release')",
    "run.annotate(140, {'bleu': 31.0}, metadata={'note': 'mine'}).metadata['note'] == 'mine'",
    "store.fork('gpt@best:val_loss', 'gpt-ft', include=['model']).head.step == 120",
    "run.rollback('best:val_loss').step == 120 and run.head.step == 120",
    "store.diff('gpt@100', 'gpt@140').equal",
    "'3 versions' in repr(store.verify(['gpt@100', 'gpt@120', 'gpt@140']))",
    "store.stats().versions_count == 4 and '<table>' in store.stats()._repr_html_()",
    "pickle.loads(pickle.dumps(run)).head.step == 140",
    "files.import_file(store, 'model.pt', run='pre', step=0).step == 0",
    "old = files.import_folder(store, 'outputs', run='old'); old[1].metrics['eval_loss'] == 2.0",
    "ckptstore.__version__[0].isdigit() and 'Store' in dir(ckptstore)",
]

IN_A_SHELL = [
    # line; what is printed
    ("ckptstore", "Exit codes"), ("ckptstore --help", "Check and repair"),
    ("ckptstore -h", "doctor"), ("ckptstore --version", "ckptstore 0"), ("ckptstore help", "Look"),
    ("ckptstore help ls", "--sort"), ("ckptstore ls", "lora"), ("ckptstore ls gpt", "140"),
    ("ckptstore -s ./ckpts ls", "gpt"), ("ckptstore ls --store ~/ckpts", "gpt"),
    ("ckptstore ls --json", '"runs"'), ("ckptstore ls --sort val_loss -n 1", "120"),
    ("ckptstore ls gpt --where 'val_loss < 1.3'", "120"),
    ("ckptstore ls --where 'step>=140' --where val_loss=1.5", "140"),
    ("ckptstore ls --tag release", "120"), ("ckptstore show gpt", "model.0.weight"),
    ("ckptstore show gpt@latest --receipt", "RECEIPT"),
    ("ckptstore show gpt@best:val_loss", "best of the run"), ("ckptstore log --graph", "gpt@140"),
    ("ckptstore log gpt --metric val_loss", "1.2"), ("ckptstore diff gpt@100 gpt@140", "same"),
    ("ckptstore du", "total"), ("ckptstore tag gpt@140 final", "final"),
    ("ckptstore annotate gpt@140 bleu=31 --note 'in the paper'", "in the paper"),
    ("ckptstore fork gpt@120 gpt-ft", "gpt-ft@120"),
    ("ckptstore rollback gpt@best:val_loss", "gpt@120"),
    ("ckptstore export gpt@140 out.safetensors --include 'model.*'", "out.safetensors"),
    ("ckptstore import model.pt pre --step 5", "pre@5"),
    ("ckptstore import outputs old --min eval_loss", "old@20"), ("ckptstore rm gpt@100", "100"),
    ("ckptstore gc --dry-run", "nothing was changed"), ("ckptstore gc", "done in"),
    ("ckptstore retain gpt --full 'last 2'", "last 2"), ("ckptstore verify", "no damage"),
    ("ckptstore replicate --to copy", "copy"),
]  # fmt: skip


def test_there_are_enough_guesses() -> None:
    """The two tables hold at least sixty, and no line twice."""
    lines = [*IN_PYTHON, *(line for line, _ in IN_A_SHELL)]
    assert len(set(lines)) == len(lines) >= 60


@pytest.mark.short(sample=10)
@pytest.mark.parametrize("line", IN_PYTHON, ids=lambda text: text[:50])
def test_a_guess_in_python(names: dict[str, Any], line: str) -> None:
    """The line runs, and its last expression is true."""
    *before, last = line.split("; ")
    exec("\n".join(before), names)  # noqa: S102 - a line of the table above
    assert eval(last, names)  # noqa: S307
    names["store"].close()


@pytest.mark.usefixtures("names")
@pytest.mark.short(sample=10)
@pytest.mark.parametrize(("line", "printed"), IN_A_SHELL, ids=lambda text: text[:50])
def test_a_guess_in_a_shell(typed: Typed, line: str, printed: str) -> None:
    """The command exits with 0 and prints what it is asked for."""
    code, out, err = typed(line)
    assert code == 0, err
    assert printed in out
