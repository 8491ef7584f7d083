"""Trials of accuracy gates: every run has items of its own, n is what the plan says, and what is amiss is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci.eval_tasks import Row
from ci.gate_trials import TABLE, drawn, main
from ci.gate_trials_table import table
from ci.register import register_cpu_ci
from harness import gate_arms
from harness.cli import main as kvshard
from harness.fault_files import library
from harness.usage import UserError
from tests.gate_trials_rig import DIES, FAULT, NEVER_RUN, OF_DRAFTS
from tests.gate_trials_set import ROOT, SERVERS, facts

register_cpu_ci(est_time=30, stage="commit")

FAULTS = library(checked=False).faults
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that needs no lm-eval."""
    monkeypatch.setattr(gate_arms, "load", facts)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def written(folder: Path, fault: str = FAULT, *, expected: str = "fail", more: str = "") -> list[str]:
    """Words of the command, with a table of one trial."""
    (folder / "set.toml").write_text(SERVERS)
    head = f'topology = "{folder}/set.toml"\ntask = "facts"\nasked = ["--engine", "{{url:sharded}}"]\npower = 0.99\n'
    planted = f'fault = "{fault}"\nworkers = ["sharded"]\n' if fault else ""
    trial = f'[[trial]]\nname = "one"\n{planted}arm = ["--restored"]\nloss = 60\nexpected = "{expected}"\n{more}'
    (folder / "table.toml").write_text(f"{head}contexts = 16\n{trial}")
    words = {"table": "table.toml", "log-dir": "logs", "record": "record.jsonl", "markdown": "page.md"}
    return ["--runs", "2", *(word for name, path in words.items() for word in (f"--{name}", str(folder / path)))]


def test_every_run_is_evidence_of_its_own() -> None:
    """Twenty runs share no question and no context; the same seed draws the same."""
    runs = [drawn(f"one 1 {number}", 20, 16, 0) for number in range(1, 21)]
    prompts = [row["prompt"] for rows in runs for row in rows]
    contexts = [{row["prompt"].partition("\n")[0] for row in rows} for rows in runs]
    assert (400, 400) == (len(prompts), len(set(prompts)))
    assert 20 * len(contexts[0]) == len(set().union(*contexts)) == 80
    assert runs[4] == drawn("one 1 5", 20, 16, 0) != drawn("one 2 5", 20, 16, 0)


def test_items_are_facts_of_their_page() -> None:
    """Each question has its fact once, on the page that the item names; sums come last and have no page."""
    rows: list[Row] = drawn("seed", 35, 16, 31)
    facts, sums = rows[:4], rows[4:]
    for row in facts:
        context, _, asked = row["prompt"].rpartition("\n?")
        assert row["page"] == context.index(f"{asked}{row['answer']};") // 16
    assert [0, 1, 0, 1] == [row["context"] for row in facts]
    assert {(-1, True)} == {(row["page"], " plus " in row["prompt"]) for row in sums}


def test_n_is_what_the_plan_says(tmp_path: Path) -> None:
    """For each trial of the table the items are those that `kvshard gate plan` asks for."""
    found = table(ROOT / TABLE, FAULTS)
    for trial in found.trial:
        out = tmp_path / "plan.json"
        words = ["--loss", f"{trial.loss:g}", "--flip-rate", "0", "--power", f"{found.power:g}", "--json", str(out)]
        assert 0 == kvshard(["gate", "plan", *words])
        assert json.loads(out.read_text())["plans"][0]["items"] == found.items(trial)


def test_the_page_shows_the_trials() -> None:
    """A row for each trial, with its fault, loss, n and margin; it says in all 20 runs what is expected."""
    found = table(ROOT / TABLE, FAULTS)
    page = (ROOT / "docs" / "gates.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- trials: begin -->\n")[2].partition("<!-- trials: end -->")[0]
    expected = {
        f"| {each.name} | {f'`{each.fault}`' if each.fault else 'none'} | {each.loss:g} | {found.items(each)} | "
        f"{each.its_margin:g} |": f" | {each.expected} 20 of 20 | "
        for each in found.trial
    }
    rows = shown.splitlines()[2:]
    assert list(expected) == [next((head for head in expected if row.startswith(head)), row) for row in rows]
    assert [] == [row for row, said in zip(rows, expected.values(), strict=True) if said not in row]


def test_a_fault_is_seen_each_time(tmp_path: Path, capsys: Capture) -> None:
    """The gate fails in every run, which is told and kept; what was kept is not run again."""
    words = written(tmp_path)
    assert 0 == main(words), capsys.readouterr()
    said = capsys.readouterr().out
    assert said.startswith("one 1: fail, 15 lost, 0 gained of 15, ")
    row = "| one | `host.restore-without-index` | 60 | 15 | 60 | 15 | 0 | fail 2 of 2 | "
    assert row in said
    assert row in (tmp_path / "page.md").read_text()
    items = [(tmp_path / "logs" / "one" / f"items-{number}.jsonl").read_text() for number in (1, 2)]
    assert items[0] != items[1]

    (tmp_path / "set.toml").write_text(SERVERS.replace("{python}", "no-such-program"))
    assert 0 == main(words)
    assert "one 1: " not in capsys.readouterr().out
    assert 3 == main([*words, "--runs", "3"])  # now it needs servers


def test_drafts_are_judged_beside_the_answers(tmp_path: Path, capsys: Capture) -> None:
    """A trial of drafts counts the items that accept less, and is an error where answers are lost as well."""
    assert 0 == main(written(tmp_path, OF_DRAFTS, more="drafts = true\n"))
    assert "one 1: fail, 15 lost, 0 gained of 15, " in capsys.readouterr().out
    (tmp_path / "record.jsonl").unlink()
    assert 1 == main(written(tmp_path, more="drafts = true\n"))
    assert "s  EXPECTED FAIL: the answers: The candidate is worse: " in capsys.readouterr().out


def test_a_verdict_that_was_not_expected(tmp_path: Path, capsys: Capture) -> None:
    """Right servers pass: that is an error where a fail was expected, and none where a pass was."""
    assert 1 == main(written(tmp_path, "", expected="fail"))
    assert "0 gained of 15, " in (said := capsys.readouterr().out)
    assert "s  EXPECTED FAIL: The candidate is not 60 points worse" in said
    assert "| one | none | 60 | 15 | 60 | 0 | 0 | pass 2 of 2 | " in said
    assert 0 == main(written(tmp_path, "", expected="pass"))


def test_a_loss_too_small_for_n_is_inconclusive(tmp_path: Path) -> None:
    """One item in four is lost at most, less than n was planned for: neither a pass nor a fail."""
    assert 0 == main(written(tmp_path, expected="inconclusive", more="unrelated = 75\nmargin = 20\n"))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (NEVER_RUN, "what the fault changes was never run in one; nothing is shown by that"),
        (DIES, "worker 'sharded' ended with exit code 1 before it was ready"),
    ],
)
def test_a_trial_that_shows_nothing(tmp_path: Path, capsys: Capture, fault: str, says: str) -> None:
    """A fault that was not met, and servers that do not start, are errors and no verdicts."""
    assert 3 == main(written(tmp_path, fault, expected="pass"))
    assert says in capsys.readouterr().err


def test_a_gate_that_cannot_be_asked(tmp_path: Path, capsys: Capture) -> None:
    """It is an error with the gate's own words."""
    words = written(tmp_path, more="")
    (tmp_path / "table.toml").write_text((tmp_path / "table.toml").read_text().replace("--restored", "--timeout=9"))
    assert 3 == main(words)  # the fault was not run either
    assert "one 1: error, 0 lost, 0 gained of 0, 0 s  EXPECTED FAIL: gate arms: no arm; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"facts"', "3", "expected topology, task, asked, power, contexts, trial"),
        (FAULT, "host.restore-without-indx", "is in no library; did you mean 'host.restore-without-index'?"),
        ('["sharded"]', '["shraded"]', "worker 'shraded'; expected one of the topology: sharded"),
        ('workers = ["sharded"]\n', "", "expected `fault` and `workers`, or neither"),
        ("loss = 60", "loss = 0", "Expected `float` > 0"),
        ('name = "one"', 'name = "one"\nmarign = 3', "Object contains unknown field `marign`"),
    ],
)
def test_a_bad_table(tmp_path: Path, old: str, new: str, says: str) -> None:
    """The file, the place, what was expected."""
    written(tmp_path)
    path = tmp_path / "table.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=r"table\.toml: ") as error:
        table(path, FAULTS)
    assert says in str(error.value)


def test_an_unknown_trial(tmp_path: Path, capsys: Capture) -> None:
    """The names that there are."""
    assert 3 == main([*written(tmp_path), "--only", "won"])
    assert "--only 'won': not in the table" in capsys.readouterr().err
