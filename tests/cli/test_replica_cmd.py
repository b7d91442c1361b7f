"""replica and evict from the command line, and ``replica:NAME`` where a place may stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Cli


def test_names_are_added_listed_and_forgotten(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """As text and as JSON; the log says what was done."""
    assert "no replica has a name" in cli("replica", "ls", "-s", store_path).out
    refused = cli("replica", "add", "cold", tmp_path / "cold", "-s", store_path)
    assert refused.code == 3
    added = cli("replica", "add", "cold", tmp_path / "cold", "--create", "--json", "-s", store_path)
    assert added.document["replica"]["url"] == str(tmp_path / "cold")
    (listed,) = cli("replica", "ls", "--json", "-s", store_path).document["replicas"]
    assert (listed["name"], listed["versions"], listed["missing"]) == ("cold", 0, 6)
    assert cli("replicate", "--to", "replica:cold", "-s", store_path).code == 0
    (listed,) = cli("replica", "ls", "--json", "-s", store_path).document["replicas"]
    assert (listed["versions"], listed["missing"]) == (6, 0)
    titles, row = cli("replica", "ls", "-s", store_path).out.splitlines()
    assert titles.split() == ["NAME", "URL", "STORE", "VERSIONS", "MISSING"]
    assert (row.split()[0], row.split()[-2:]) == ("cold", ["6", "0"])
    assert f"cold is {tmp_path / 'cold'}" in cli("log", "-s", store_path).out
    assert "is forgotten" in cli("replica", "rm", "cold", "-s", store_path).out
    assert cli("replica", "rm", "cold", "-s", store_path).code == 3
    assert (tmp_path / "cold" / "store.json").exists()


@pytest.mark.parametrize(
    "words", [["add"], ["add", "cold"], ["rm"], ["rm", "a", "b"], ["ls", "a"], ["list"]]
)
def test_wrong_words_are_refused(cli: Cli, store_path: Path, words: list[str]) -> None:
    """With the usage, and nothing done."""
    assert cli("replica", *words, "-s", store_path).code == 2


def test_evict_and_what_comes_after(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Evicted versions show as records, and are exported from the replica all the same."""
    cli("replica", "add", "cold", tmp_path / "cold", "--create", "-s", store_path)
    assert cli("evict", "--replica", "cold", "-s", store_path).code == 2
    assert cli("evict", "--replica", "tape", "--run", "gpt", "-s", store_path).code == 3
    none = cli("evict", "--replica", "cold", "--run", "gpt", "--json", "-s", store_path)
    assert none.document["evicted"] == []
    cli("replicate", "--to", "replica:cold", "-s", store_path)
    dry = cli("evict", "--replica", "cold", "--run", "gpt", "-n", "-s", store_path)
    assert dry.out.startswith("would keep only the record of")
    done = cli("evict", "--replica", "cold", "--run", "gpt", "--json", "-s", store_path)
    steps = [one["step"] for one in done.document["evicted"]]
    assert steps
    assert cli("gc", "--grace", "0s", "--orphan-age", "0s", "-s", store_path).code == 0
    with ckptstore.open(store_path) as store:
        for step in steps:
            assert store.resolve(f"gpt@{step}").level == "record"
            assert store.load(f"gpt@{step}")


def test_whoever_has_a_record_s_content_is_named(
    cli: Cli, store_path: Path, tmp_path: Path
) -> None:
    """ls, show and log --graph name the replica, or its id once it has no name; errors go there."""
    cli("replica", "add", "cold", tmp_path / "cold", "--create", "-s", store_path)
    cli("replicate", "--to", "replica:cold", "-s", store_path)
    assert "cold" not in cli("ls", "-s", store_path).out  # of what is here nothing is unusual
    assert cli("evict", "--replica", "cold", "gpt@200", "-s", store_path).code == 0
    told = "record only; cold has it"
    for words in (["ls"], ["show", "gpt@200"], ["log", "--graph"]):
        assert cli(*words, "-s", store_path).out.count(told) == 1, words
    (store,) = cli("show", "gpt@200", "--json", "-s", store_path).document["version"]["replicas"]
    (named,) = cli("replica", "ls", "--json", "-s", store_path).document["replicas"]
    assert named["store"] == store
    assert f"cold at {tmp_path / 'cold'}" in cli("show", "gpt@200", "-s", store_path).out
    refused = cli("rollback", "gpt@200", "-s", store_path)
    assert (refused.code, "another store has it" in refused.err) == (3, True)
    for words in (["diff", "gpt@200", "gpt"], ["fork", "gpt@200", "ft"]):
        assert cli(*words, "-s", store_path).code == 0, words
    assert cli("rm", "--run", "ft", "-s", store_path).code == 0
    thawed = cli("thaw", "gpt@200", "-s", store_path)
    assert thawed.code == 3
    hint = thawed.err.split("hint: ckptstore ")[1].split()
    assert cli(*hint).code == 0
    cli("replica", "rm", "cold", "-s", store_path)
    assert f"record only; store {store[:8]} has it" in cli("ls", "-s", store_path).out
    with ckptstore.open(store_path) as opened:
        opened.age(["gpt@300"], "record")
    assert cli("thaw", "gpt@300", "-s", store_path).code == 3


def test_a_fork_begins_in_a_replica(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """``fork --to replica:NAME`` writes there; a name that is none fails."""
    cli("replica", "add", "cold", tmp_path / "cold", "--create", "-s", store_path)
    assert cli("fork", "gpt@200", "ft", "--to", "replica:tape", "-s", store_path).code == 3
    assert cli("fork", "gpt@200", "ft", "--to", "replica:cold", "-s", store_path).code == 0
    with ckptstore.open(tmp_path / "cold") as cold:
        assert cold.load("ft")["epoch"] == 1


def test_a_job_finds_its_target_by_name(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """``url = "replica:cold"``, with a dry run before; a name that is none fails."""
    cli("replica", "add", "cold", tmp_path / "cold", "--create", "-s", store_path)
    job = tmp_path / "job.toml"
    text = f'[source]\nurl = "{store_path}"\n[target]\nurl = "replica:NAME"\n'
    text += '[retain]\nevict = "last 1"\n'
    job.write_text(text.replace("NAME", "tape"))
    assert cli("archive", "--job", job).code == 3
    job.write_text(text.replace("NAME", "cold"))
    assert cli("archive", "--job", job, "--dry-run").code == 0
    done = cli("archive", "--job", job, "--json")
    assert done.code == 0, done.err
    steps = {step["name"]: step for step in done.document["steps"]}
    assert steps["replicate"]["result"]["copied"] == 6
    assert steps["evict"]["result"]["evicted"] > 0
    assert json.dumps(done.document).count("replica:cold") == 0  # it is told where that is


def test_repair_from_a_replica_by_name(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """``repair --from replica:NAME`` brings back what is lost."""
    cli("replica", "add", "cold", tmp_path / "cold", "--create", "-s", store_path)
    cli("replicate", "--to", "replica:cold", "-s", store_path)
    next((store_path / "packs").rglob("*.pack")).unlink()
    assert cli("verify", "-s", store_path).code == 5
    assert cli("repair", "--from", "replica:cold", "-s", store_path).code == 0
    assert cli("verify", "-s", store_path).code == 0


def test_what_is_evicted_is_pinned_there(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Rm and retain in the replica refuse and say why; pins go by version, and by store."""
    cold = tmp_path / "cold"
    cli("replica", "add", "cold", cold, "--create", "-s", store_path)
    cli("replicate", "--to", "replica:cold", "-s", store_path)
    bare = cli("evict", "--replica", "cold", "gpt@200", "--no-pin", "-s", store_path)
    assert "none pinned in cold" in bare.out
    done = cli("evict", "--replica", "cold", "gpt@200", "-s", store_path)
    assert "1 version pinned in cold" in done.out
    with ckptstore.open(store_path) as opened:
        hot = opened.info.store_id[:8]
    why = f"pinned for the store {hot}, which evicted it"
    assert why in cli("rm", "gpt@200", "--dry-run", "-s", cold).out
    refused = cli("rm", "gpt@200", "--force", "-s", cold)
    assert (refused.code, why in refused.err) == (7, True)
    assert why in cli("retain", "--full", "last 1", "-s", cold).out
    assert why in cli("show", "gpt@200", "-s", cold).out
    shown = cli("show", "gpt@200", "--json", "-s", cold).document["version"]
    assert (shown["pinned"], len(shown["pinned_for"])) == (True, 1)

    assert cli("pin", "-s", cold).code == 2
    assert cli("pin", "gpt@200", "--delete", "--for", hot, "-s", cold).code == 2
    assert cli("pin", "--for", hot, "-s", cold).code == 2
    assert cli("pin", "--delete", "--for", "00000000ffff", "-s", cold).code == 3
    gone = cli("pin", "--delete", "--for", hot, "-s", cold)
    assert "gpt@200" in gone.out
    assert "is not pinned any more" in gone.out
    again = cli("evict", "--replica", "cold", "gpt@200", "--json", "-s", store_path)
    assert len(again.document["pinned"]) == 1
    assert cli("pin", "gpt@200", "--delete", "-s", cold).code == 0
    assert cli("rm", "gpt@200", "-s", cold).code == 0


def test_options_go_to_the_place_that_they_are_for(
    cli: Cli, store_path: Path, tmp_path: Path
) -> None:
    """``url`` among the options of a name is checked; without it none is sent."""
    cold = tmp_path / "cold"
    cli("replica", "add", "cold", cold, "--create", "-s", store_path)
    to = ("replicate", "--to", "replica:cold", "-s", store_path)
    bare = cli(*to, "--to-option", "kind=local")
    assert (bare.code, "for which place" in bare.err) == (2, True)
    other = cli(*to, "--to-option", "kind=local", "--to-option", f"url={tmp_path}/other")
    assert (other.code, "are for" in other.err) == (4, True)
    assert f"--to-option url={cold}" in other.err
    assert cli(*to, "--to-option", "kind=local", "--to-option", f"url={cold}").code == 0
    mended = ("repair", "--from", "replica:cold", "-s", store_path)
    assert cli(*mended, "--from-option", "kind=local").code == 2
    assert cli(*mended, "--from-option", "kind=local", "--from-option", f"url={cold}").code == 0
    for own in ("url=x", "read_only=true", "single_writer=true"):
        refused = cli("ls", "-s", store_path, "-o", own)
        assert (refused.code, "not an option of the storage" in refused.err) == (2, True)


def test_options_of_a_job_s_target_by_name(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """With ``url`` beside them, and only where the target is a name."""
    cold = tmp_path / "cold"
    cli("replica", "add", "cold", cold, "--create", "-s", store_path)
    job = tmp_path / "job.toml"
    text = f'[source]\nurl = "{store_path}"\n[target]\nurl = "PLACE"\noptions = {{OPTIONS}}\n'
    options = f'kind = "local", url = "{cold}"'
    cases = [
        ("replica:cold", options, 0),
        ("replica:cold", f'kind = "local", url = "{cold}2"', 4),
        ("replica:cold", 'kind = "local"', 2),
        (str(cold), options, 2),
    ]
    for place, given, code in cases:
        job.write_text(text.replace("PLACE", place).replace("{OPTIONS}", f"{{ {given} }}"))
        assert cli("archive", "--job", job).code == code, (place, given)
