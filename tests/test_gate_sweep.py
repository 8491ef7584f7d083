"""A sweep of gates: each fault is looked at once, and what became of it is told, kept and shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ci.gate_sweep import main
from ci.gate_sweep_result import Judged, Swept
from ci.register import register_cpu_ci
from harness import gate_arms
from tests.gate_trials_rig import DIES, FAULT, NEVER_RUN, OF_DRAFTS
from tests.gate_trials_set import ROOT, SERVERS, facts

register_cpu_ci(est_time=20, stage="commit")

SWEEP = '[sweep]\nworkers = ["sharded"]\narm = ["--restored"]\nloss = 60\n'
ALL = (FAULT, OF_DRAFTS, DIES, NEVER_RUN)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that needs no lm-eval."""
    monkeypatch.setattr(gate_arms, "load", facts)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def written(folder: Path, sweep: str = SWEEP, trial: str = FAULT) -> list[str]:
    """Words of the command, with a table that has one trial."""
    (folder / "set.toml").write_text(SERVERS)
    head = f'topology = "{folder}/set.toml"\ntask = "facts"\nasked = ["--engine", "{{url:sharded}}"]\npower = 0.99\n'
    planted = f'fault = "{trial}"\nworkers = ["sharded"]\narm = ["--restored"]\nloss = 60\nexpected = "fail"\n'
    (folder / "table.toml").write_text(f'{head}contexts = 16\n{sweep}[[trial]]\nname = "one"\n{planted}')
    words = {"table": "table.toml", "log-dir": "logs", "record": "record.jsonl", "markdown": "page.md"}
    return [word for name, path in words.items() for word in (f"--{name}", str(folder / path))]


def only(*faults: str) -> list[str]:
    """Words that choose them."""
    return [word for name in faults for word in ("--only", name)]


def test_each_fault_is_told_by_what_it_changes(tmp_path: Path, capsys: Capture) -> None:
    """Answers, accept lengths alone, servers that end, and a fault that is never run are told apart."""
    assert 0 == main([*written(tmp_path), *only(*ALL)]), capsys.readouterr()
    kept = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    fates = {
        each["fault"]: Swept(**{**each, "members": tuple(Judged(**one) for one in each["members"])}) for each in kept
    }
    assert {FAULT: "answers", OF_DRAFTS: "drafts", DIES: "error", NEVER_RUN: "not met"} == {
        name: its.outcome for name, its in fates.items()
    }
    assert f"{FAULT}: answers, run " in (said := capsys.readouterr().out)
    assert f"{DIES}: error, run 0 times, worker 'sharded' ended with exit code 1 before it was ready" in said
    page = (tmp_path / "page.md").read_text()
    assert "4 faults: 1 answers, 1 drafts, 1 error, 0 nothing, 1 not met." in page
    assert re.search(rf"\n\| `{FAULT}` \| .* \| restored 15 lost, 0 gained of 15, .* \| one \|\n", page)
    assert f"## What it changes was never run\n\n`{NEVER_RUN}`\n" in page


def test_what_was_kept_is_not_asked_again(tmp_path: Path, capsys: Capture) -> None:
    """The record answers, without servers; another seed asks anew."""
    words = [*written(tmp_path), *only(NEVER_RUN)]
    assert 0 == main(words)
    capsys.readouterr()
    (tmp_path / "set.toml").write_text(SERVERS.replace("{python}", "no-such-program"))
    assert 0 == main(words)
    assert capsys.readouterr().out == ""
    assert 0 == main([*words, "--seed", "2"])
    assert f"{NEVER_RUN}: error, run 0 times, " in capsys.readouterr().out


def test_answers_without_a_trial(tmp_path: Path, capsys: Capture) -> None:
    """A fault that changes answers and has no trial makes the sweep fail, and is named."""
    assert 1 == main([*written(tmp_path, trial=NEVER_RUN), *only(FAULT)])
    assert f"{FAULT} changes answers and has no trial in {tmp_path}/table.toml\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sweep", "more", "says"),
    [
        ("", [], "no [sweep]; expected workers, arm and loss"),
        (SWEEP.replace("sharded", "shraded"), [], "worker 'shraded'; expected one of the topology: sharded"),
        (SWEEP, only("host.restore-without-indx"), "in no library; did you mean 'host.restore-without-index'?"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: Capture, sweep: str, more: list[str], says: str) -> None:
    """The value, the place, what was expected."""
    assert 3 == main([*written(tmp_path, sweep), *more])
    assert says in capsys.readouterr().err
