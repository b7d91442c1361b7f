"""replica, evict, replicate and publish from the command line, and where a replica is read."""

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


def test_evict_and_what_comes_after(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Evicted versions show as records, and are exported from the replica all the same."""
    cli("replica", "add", "cold", tmp_path / "cold", "--create", "-s", store_path)
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


def test_copies_that_are_lost_are_told(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Versions whose copies are gone past the log of the replica stay, with an exit code."""
    cli("replica", "add", "cold", tmp_path / "cold", "--create", "-s", store_path)
    cli("replicate", "--to", "replica:cold", "-s", store_path)
    with ckptstore.open(tmp_path / "cold") as cold:
        version = cold.resolve("gpt@200")
    (tmp_path / "cold" / version.manifest_key).unlink()
    for more in (["--dry-run"], []):
        done = cli("evict", "--replica", "cold", "gpt@200", *more, "--json", "-s", store_path)
        assert done.code == 5
        assert (done.document["evicted"], done.document["missed"]) == ([], [version.id])


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


def test_a_whole_store(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """It makes the target, says what it did, and a repetition brings nothing."""
    to = tmp_path / "cold"
    foreseen = cli("replicate", "--to", to, "--dry-run", "-s", store_path)
    assert foreseen.code == 0
    assert "would copy 6 versions" in foreseen.out
    assert not to.exists()

    done = cli("replicate", "--to", to, "--json", "-s", store_path)
    assert done.code == 0
    assert len(done.document["copied"]) == 6
    assert done.document["checked"] is True
    assert done.document["noted"] is True
    again = cli("replicate", "--to", to, "-s", store_path)
    assert "copied 0 versions" in again.out
    assert "6 versions there already" in again.out
    listed = [cli("ls", "gpt", "--json", "-s", place).document for place in (store_path, to)]
    ids = [[version["id"] for version in document["versions"]] for document in listed]
    assert ids[0] == ids[1]


def test_refs_runs_and_rules(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """What is named travels; the rest comes as records or not at all."""
    to = tmp_path / "cold"
    done = cli("replicate", "gpt@best:val_loss", "--to", to, "--json", "-s", store_path)
    assert done.document["records_count"] == 3
    ruled = cli(
        "replicate", "--run", "gpt", "--keep", "tagged", "--to", to, "--json", "-s", store_path
    )
    assert len(ruled.document["copied"]) == 1
    limited = cli(
        "replicate", "--run", "lora", "--limit-rate", "1GiB", "--to", to, "-s", store_path
    )
    assert limited.code == 0
    assert "read back" in limited.out


def test_what_is_refused(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """One store twice, and unrelated runs of a name, have exit codes."""
    assert cli("replicate", "--to", store_path, "-s", store_path).code == 4
    with ckptstore.open(tmp_path / "other", create=True) as other:
        other.run("gpt").save({"x": 1}, step=1)
    refused = cli("replicate", "--to", tmp_path / "other", "-s", store_path)
    assert refused.code == 4
    assert "fork" in refused.err


def test_damage_is_told(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """A damaged version makes the exit code 5; the others are there."""
    with ckptstore.open(store_path) as store:
        pack = store.version("lora@7")._content.manifest.pieces.packs[0]
    (store_path / "packs" / pack[:2] / f"{pack}.pack").unlink()
    done = cli("replicate", "--to", tmp_path / "cold", "-s", store_path)
    assert done.code == 5
    assert "not copied: lora@7" in done.out
    with ckptstore.open(tmp_path / "cold") as store:
        assert len(store.versions("gpt")) == 5
        assert store.resolve("lora@7").level == "record"


def test_unchecked(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Without reading back nothing is noted in the source."""
    done = cli("replicate", "--no-check", "--to", tmp_path / "cold", "--json", "-s", store_path)
    assert done.document["checked"] is False
    assert done.document["noted"] is False


WORDS = (
    ["export", "gpt@200", "{}/out.safetensors"],
    ["diff", "gpt@200", "gpt@400", "--values"],
    ["fork", "gpt@200", "tuned"],
)


@pytest.fixture
def key(cli: Cli, tmp_path: Path) -> str:
    """Return where a new key is."""
    assert cli("key", "new", tmp_path / "key").code == 0
    return f"file:{tmp_path}/key"


@pytest.fixture
def hot(cli: Cli, store_path: Path, tmp_path: Path, key: str) -> Path:
    """Return a store that has the record of gpt@200, whose content is in an encrypted replica."""
    cold = tmp_path / "cold"
    to_key = ("--to-key", key)
    assert cli("replicate", "--to", cold, *to_key, "-s", store_path).code == 0
    assert cli("replica", "add", "cold", cold, *to_key, "-s", store_path).code == 0
    evicting = ("evict", "--replica", "cold", "gpt@200", *to_key, "-s", store_path)
    assert len(cli(*evicting, "--json").document["evicted"]) == 1
    return store_path


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0])
def test_a_replica_is_opened_with_what_is_given_for_it(
    cli: Cli, hot: Path, tmp_path: Path, key: str, words: list[str]
) -> None:
    """Without the key the hint names the options; with them the content is read there."""
    words = [word.format(tmp_path) for word in words]
    refused = cli(*words, "-s", hot)
    assert refused.code == 3
    hint = refused.err.split("on the command line: ")[1].split()
    assert hint == ["--from", "replica:cold", "--from-key", "SPEC"]
    done = cli(*words, *hint[:3], key, "-s", hot)
    assert done.code == 0, done.err


def test_options_without_their_store_are_refused(cli: Cli, hot: Path, key: str) -> None:
    """A key for a store that is not named would do nothing: that is said, not passed over."""
    for words in (
        ("export", "gpt@200", "x.safetensors", "--from-key", key),
        ("repair", "--from-key", key),
        ("verify", "--heal-key", key),
        ("fork", "gpt@400", "tuned", "--to-key", key),
    ):
        done = cli(*words, "-s", hot)
        assert (done.code, "none is named" in done.err) == (2, True), words


def test_only_a_replica_can_be_read_from(cli: Cli, hot: Path, tmp_path: Path) -> None:
    """--from of these names a replica that there is; for another store there is --store."""
    words = ("export", "gpt@200", tmp_path / "x.safetensors", "-s", hot)
    place = cli(*words, "--from", tmp_path / "cold")
    assert (place.code, "--store URL" in place.err) == (2, True)
    unknown = cli(*words, "--from", "replica:warm")
    assert (unknown.code, "there is cold" in unknown.err) == (3, True)
