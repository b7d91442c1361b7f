"""What goes wrong on the command line: a code per kind, a document, message and hint."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaging import flip_pack
from typer.main import get_command

import ckptstore.cli
from ckptstore import errors
from ckptstore.backends.registry import open_backend
from ckptstore.cli import ls_cmd
from ckptstore.cli.main import COMMANDS, EXIT_CODES, MODULES, build_app
from ckptstore.errors import CkptStoreError
from ckptstore.replicas.options import open_target
from ckptstore.repo import open_repo
from ckptstore.store import Store, mend_superblock, open_store, rotate_key
from ckptstore.store.opening import open_target_of
from tests.cli.conftest import Cli


def _damage(store: Path) -> str:
    """Flip a bit in the newest run's only pack and return its key."""
    packs = sorted(store.glob("packs/*/*.pack"), key=lambda path: path.stat().st_size)
    flip_pack(packs[0])
    return packs[0].stem


def test_commands_that_hints_name_are_there() -> None:
    """Each ``ckptstore COMMAND`` in a message or hint is a command, and its options are its own."""
    root = Path(ckptstore.__path__[0])
    app: Any = get_command(build_app())
    seen = 0
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.keyword) and node.arg == "hint"):
                continue
            text = "".join(str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant))
            for command, rest in re.findall(r"\bckptstore ([a-z]+)([^;]*)", text):
                if command in {"made", "wrote"}:
                    continue
                assert command in COMMANDS, (path, text)
                known = {name for each in app.commands[command].params for name in each.opts}
                assert set(re.findall(r"--[a-z-]+", rest)) <= known, (path, text)
                seen += 1
    assert seen >= 10


def test_no_store_named(cli: Cli) -> None:
    """Neither --store nor the variable: wrong arguments, and the hint names both."""
    result = cli("ls")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "error: no store is named\nhint: give --store URL, or set CKPTSTORE_URL\n"
    )


@pytest.mark.parametrize(("command", "choices"), [("key", "rotate"), ("replica", "add")])
def test_a_command_without_its_action(cli: Cli, command: str, choices: str) -> None:
    """One line that names what there is, and where the help is; no escapes."""
    result = cli(command)
    assert (result.code, result.out) == (2, "")
    error, hint = result.err.splitlines()
    assert "ACTION" in error
    assert choices in error
    assert "\\" not in error
    assert hint == f"hint: see ckptstore {command} --help"


def test_common_options_before_the_command(cli: Cli, tmp_path: Path) -> None:
    """They mean the same there; what is no common option, or no command, is refused as ever."""
    place = tmp_path / "s"
    assert cli("-s", place, "init").code == 0
    assert cli("--json", f"--store={place}", "-q", "ls", "--limit", 3).document["versions"] == []
    assert cli("-s", place).code == 2
    assert cli("-s", place, "bogus").code == 2
    assert cli("--limit", 3, "ls", "-s", place).code == 2
    assert cli("--version").out.startswith("ckptstore ")


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["ls"], 3, "store_not_found"),
        (["bogus"], 2, "invalid_input"),
        (["ls", "--bogus"], 2, "invalid_input"),
        (["show"], 2, "invalid_input"),
        (["ls", "--limit", "-1"], 2, "invalid_input"),
        (["verify", "--level", "deep"], 2, "invalid_input"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_error_document(
    cli: Cli, tmp_path: Path, arguments: list[str], code: int, kind: str
) -> None:
    """One document with kind, message, hint and code on stdout; stderr says the same in words."""
    result = cli(*arguments, "--json", "-s", tmp_path)
    assert result.code == code
    error = result.document["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code)
    assert error["message"] in result.err
    assert error["hint"] in result.err


@pytest.mark.parametrize(
    ("ref", "code", "kind"),
    [
        ("gpt@", 2, "invalid_ref"),
        ("gpt@600", 3, "version_not_found"),
        ("gtp", 3, "run_not_found"),
        ("gpt@best:bleu", 3, "version_not_found"),
        ("gpt@best:acc", 2, "invalid_ref"),
    ],
)
def test_refs_that_name_nothing(cli: Cli, history: Path, ref: str, code: int, kind: str) -> None:
    """Every command that takes a REF says what is wrong with it, in the same way."""
    for command in (["show", ref], ["verify", ref], ["export", ref, "x.safetensors"]):
        result = cli(*command, "--json", "-s", history)
        assert (result.code, result.document["error"]["kind"]) == (code, kind)


def test_every_class_of_error_ends_in_its_code(
    cli: Cli, history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole tree: whatever a command raises becomes its exit code, kind, message and hint."""
    known = [getattr(errors, name) for name in errors.__all__]
    for kind in known:
        assert issubclass(kind, CkptStoreError)

        def fail(*_: object, kind: type[CkptStoreError] = kind, **__: object) -> None:
            raise kind("it \x1b[31mfailed", hint="try again")

        monkeypatch.setattr(ls_cmd, "opened", fail)
        result = cli("ls", "--json", "-s", history)
        assert result.code == kind.exit_code
        assert result.code in EXIT_CODES
        assert result.document["error"]["kind"] == kind.kind
        assert result.err == "error: it \\x1b[31mfailed\nhint: try again\n"


def test_defect_is_shown_whole_and_exits_with_1(
    cli: Cli, history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign exception prints its traceback, and still one document."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ls_cmd, "opened", fail)
    result = cli("ls", "--json", "-s", history)
    assert result.code == 1
    assert "Traceback" in result.err
    assert result.document["error"]["kind"] == "internal"


def test_verify_names_what_is_damaged(cli: Cli, store_path: Path) -> None:
    """Exit code 5, a row for version and tensor, and a document that is the report."""
    assert cli("verify", "-s", store_path).code == 0
    _damage(store_path)
    result = cli("verify", "-s", store_path)
    assert result.code == 5
    row = next(line.split() for line in result.out.splitlines() if line.startswith("lora@7"))
    assert row[2] == "a"
    document = cli("verify", "lora", "gpt@100", "--json", "-s", store_path).document
    assert (document["ok"], document["versions_count"]) == (False, 2)
    assert [(p["run"], p["step"], p["tensor"]) for p in document["problems"]] == [("lora", 7, "a")]
    assert document["damaged_versions"] == [document["problems"][0]["version"]]
    assert cli("verify", "gpt", "-s", store_path).code == 0
    assert cli("verify", "--level", "records", "-s", store_path).code == 0


def test_export_of_damage_exits_with_5(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """A damaged tensor is named, and no file appears."""
    _damage(store_path)
    path = tmp_path / "a.safetensors"
    result = cli("export", "lora", path, "-s", store_path)
    assert (result.code, path.exists()) == (5, False)
    assert "tensor a" in result.err


def test_damaged_log_and_newer_formats(cli: Cli, store_path: Path) -> None:
    """A damaged commit is integrity (5); a superblock of something else is format (6)."""
    commit = store_path / "commits/000000/000000000002.json"
    commit.chmod(0o644)
    commit.write_bytes(commit.read_bytes().replace(b"val_loss", b"val_lost"))
    assert cli("ls", "-s", store_path).code == 5
    superblock = store_path / "store.json"
    superblock.chmod(0o644)
    superblock.write_bytes(b"{}")
    assert cli("ls", "-s", store_path).code in {5, 6}


@pytest.mark.parametrize(
    "text", ["nokey", "=value", "two words=1", "bad key secret", "timeout:=five-secret"]
)
def test_wrong_options_are_refused_without_their_values(cli: Cli, history: Path, text: str) -> None:
    """An option may hold a credential: an error never repeats it."""
    result = cli("ls", "-s", history, "--option", text)
    assert result.code == 2
    assert "secret" not in result.err


def test_options_reach_the_backend(cli: Cli) -> None:
    """--option is handed on: the backend of a memory store takes none, and says which it got."""
    result = cli("ls", "-s", "memory://x", "-o", "a=1", "--option", 'b:={"c": 2}')
    assert result.code == 2
    assert "a, b" in result.err


def test_modules_of_commands() -> None:
    """Every command has a module, its own or its counterpart's; every module is wired."""
    modules = {module.name for module in pkgutil.iter_modules(ckptstore.cli.__path__)}
    assert {f"{MODULES.get(name, name)}_cmd" for name in COMMANDS} == {
        m for m in modules if m.endswith("_cmd")
    }


TAKING: tuple[Callable[..., Any], ...] = (
    open_store, open_repo, open_backend, open_target, open_target_of, mend_superblock, rotate_key,
    Store.add_replica,
)  # fmt: skip
"""What takes options of the storage library beside its own."""


def _names() -> list[str]:
    return sorted({name for one in TAKING for name in inspect.signature(one).parameters})


@pytest.mark.short(sample=8)
@pytest.mark.parametrize("name", _names())
def test_no_name_of_an_option_is_taken_for_one_of_ours(
    cli: Cli, store_path: Path, tmp_path: Path, name: str
) -> None:
    """--option NAME=x of a name that a function of ours has is a wrong argument, never a defect."""
    given = ("--option", f"{name}=x")
    second = ("--to-option", f"{name}=x")
    other = tmp_path / "other"
    for arguments in (
        ("ls", "-s", store_path, *given),
        ("tag", "gpt@100", "t", "-s", store_path, *given),
        ("init", other, *given),
        ("doctor", tmp_path / "any", *given),
        ("repair", "-s", store_path, *given),
        ("replicate", "-s", store_path, "--to", other, *second),
        ("replica", "add", "cold", other, "-s", store_path, *second),
        ("fork", "gpt@100", "new", "--to", other, "-s", store_path, *second),
    ):
        done = cli(*arguments)
        assert done.code not in {0, 1}, (arguments, done)
        assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "message", "hint"),
    [
        (["ls", "--limit"], 2, "requires an argument", "see ckptstore ls --help"),
        (["verify", "--level", "deep"], 2, "'--level': 'deep' is not one of", "verify --help"),
        (["verify", "--part", "3"], 2, "--part says which part of a sample", "--sample 5%"),
        (["verify", "--sample", "200%"], 2, "a sample is a number from", "such as 0.05"),
        (["verify", "--resume", "/no/such/x"], 8, "No such file", "a folder that is there"),
        (["show", "gpt@999"], 3, "run 'gpt' has no step 999", "the nearest is 500"),
        (["show", "gpt@250"], 3, "run 'gpt' has no step 250", "the nearest are 200 and 300"),
        (["retain", "--clear", "--set"], 2, "--clear stands alone", "retain [RUN] --clear"),
        (["show", "deadbeef"], 3, "neither a run nor", "ckptstore ls"),
        (["doctor", "--size", "900GiB"], 2, "to measure", "64 MiB"),
        (["retain"], 2, "has no retention policy", "'last 3' for full"),
        (["export", "gpt", "/no/such/x.safetensors"], 8, "ENOENT", "is missing"),
        (["ls", "-o", "read_only=true"], 2, "'read_only' is not an option", "open a store so"),
        (["ls", "-o", "encryption_key=secret"], 2, "is not an option", "--key SPEC"),
    ],
)
def test_a_wrong_command_is_told_what_to_do(
    cli: Cli, store_path: Path, arguments: list[str], code: int, message: str, hint: str
) -> None:
    """Each of these ends with its exit code, says what is wrong, and what to do next."""
    done = cli(arguments[0], "-s", store_path, *arguments[1:])
    first, _, second = done.err.partition("hint: ")
    assert (done.code, done.out) == (code, "")
    assert message in first
    assert hint in second


@pytest.mark.parametrize("below", ["", "/store"])
def test_a_file_in_the_way_is_told(cli: Cli, tmp_path: Path, below: str) -> None:
    """No store can be made where a file is, or below one; the hint says what is in the way."""
    (tmp_path / "file").write_text("x")
    done = cli("init", f"{tmp_path}/file{below}")
    assert done.code in {2, 8}
    assert done.err


def test_a_version_that_is_named_and_stays_is_told_why(
    cli: Cli, store_path: Path, tmp_path: Path
) -> None:
    """Evict and replicate say of each version that a REF names why nothing became of it."""
    other, third = tmp_path / "other", tmp_path / "third"
    assert cli("replicate", "-s", store_path, "--to", other).code == 0
    assert cli("replica", "add", "cold", other, "-s", store_path).code == 0
    named = ("evict", "--replica", "cold", "gpt@500", "gpt@100", "gpt@200", "-s", store_path)
    out = cli(*named).out
    assert "stays as it is: the head of its run" in out
    assert "stays as it is: tagged first" in out
    stays = {one["step"]: one["why"] for one in cli(*named, "--json").document["stays"]}
    assert stays[200] == "only its record is here already"
    assert cli("replicate", "gpt@500", "-s", store_path, "--to", third).code == 0
    assert cli("replica", "add", "far", third, "-s", store_path).code == 0
    out = cli("evict", "--replica", "far", "gpt@300", "-s", store_path).out
    assert "stays as it is: not in far" in out
    out = cli("replicate", "gpt@200", "-s", store_path, "--to", third).out
    assert "stays: only its record is here" in out


def test_a_bare_id_names_a_version_to_replicate(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Tables show ids without their #, and so replicate takes them, as every command does."""
    found = cli("show", "gpt@300", "--json", "-s", store_path).document["version"]["id"]
    done = cli("replicate", found[:8], "-s", store_path, "--to", tmp_path / "other", "--json")
    assert done.document["copied"] == [found]


def test_a_huge_limit_is_no_limit(cli: Cli, store_path: Path) -> None:
    """A number that no machine counts to lists what there is."""
    for words in (["ls"], ["log"], ["log", "--graph"], ["diff", "gpt@100", "gpt@200"]):
        done = cli(*words, "--limit", 10**20, "-s", store_path)
        assert done.code == 0, done.err


def test_an_empty_store_answers_every_question(cli: Cli, tmp_path: Path) -> None:
    """Where nothing was saved yet, each command says so or shows nothing; none fails for it."""
    store = tmp_path / "store"
    assert cli("init", store).code == 0
    for words in (
        ["ls"],
        ["log"],
        ["log", "--graph"],
        ["du"],
        ["du", "--shared"],
        ["stats"],
        ["stats", "--prometheus"],
        ["retain", "--full", "last 3"],
        ["gc", "--dry-run"],
        ["gc"],
        ["verify"],
        ["repair"],
        ["replicate", "--to", tmp_path / "other"],
        ["replica", "ls"],
    ):
        done = cli(*words, "-s", store)
        assert done.code == 0, (words, done.err)
        assert "error" not in done.err
    assert "no commits yet" in cli("log", "-s", store).err
    assert cli("log", "--json", "-s", store).document["commits"] == []


REFUSALS = Path(__file__).with_name("refusals.txt").read_text().splitlines()


@pytest.mark.parametrize("line", REFUSALS)
def test_what_makes_no_sense_is_refused(
    cli: Cli, history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Wrong words, words that exclude each other and names of nothing: a code, and no change.

    Each line of the file has the exit code and the command.
    """
    monkeypatch.chdir(tmp_path)
    code, command, *words = shlex.split(line)
    done = cli(command, "-s", history, *words)
    assert done.code == int(code), done.err
    assert done.err
    assert list(tmp_path.iterdir()) == []
    assert len(list(history.rglob("commits/*/*"))) == 6
