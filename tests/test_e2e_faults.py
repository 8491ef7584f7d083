"""Faults in servers, seen over HTTP: a right server survives, a wrong one is caught, a bad table is an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from ci.e2e_faults import TABLE, code, main
from ci.e2e_faults_table import Entry, Table, chosen, table, topology
from ci.e2e_faults_trial import Fate, Outcome, fates, judged
from ci.register import register_cpu_ci
from harness.fault_files import library
from harness.launch.processes import STARTED_AGAIN
from harness.result import CaseResult, Failure
from harness.suite import all_cases, case_by_id
from harness.types import Verdict
from harness.usage import UserError
from tests.e2e_faults_rig import DIES

register_cpu_ci(est_time=20, stage="commit")

ROOT = Path(__file__).parent.parent
CASES = all_cases(("e2e",))
IDS = {made.id for made in CASES}
FAULTS = library(checked=False).faults
FEW = [case_by_id(name, CASES) for name in ("capacity.ranks_add_up", "host.draft_accepts_alike")]
SERVERS = """
[defaults]
health = "/model_info"
ready_seconds = 30
stop_seconds = 5

[[worker]]
name = "pair"
command = ["{python}", "-m", "tests.e2e_faults_rig", "{port}", "{prefill_port}", "{control_port}"]
ports = ["prefill_port", "control_port"]

[[worker]]
name = "unneeded"
command = ["no-such-program"]

[entry]
worker = "unneeded"
"""
ADDRESS = (
    "{url:pair}?prefill=http://127.0.0.1:{prefill_port:pair}&control=http://127.0.0.1:{control_port:pair}&settle=3"
)
HIDDEN = ("gather.restore-unawaited", "sender.writes-before-rows")
CAUGHT = ("host.restore-without-draft", 'expected = "caught"\ncases = ["host.draft_accepts_alike"]')


def written(folder: Path, *faults: tuple[str, str], head: str = "", workers: str = '["pair"]') -> Path:
    (folder / "set.toml").write_text(SERVERS)
    head = head or f'topology = "{folder}/set.toml"\naddress = "{ADDRESS}"\n'
    rows = [f'[[fault]]\nid = "{name}"\nworkers = {workers}\n{more}\n' for name, more in faults]
    (folder / "table.toml").write_text(head + "\n".join(rows))
    return folder / "table.toml"


@pytest.mark.parametrize(
    ("name", "outcome", "runs", "failed"),
    [
        ("host.restore-without-draft", Outcome.CAUGHT, 3, ("host.draft_accepts_alike",)),
        ("gather.restore-unawaited", Outcome.HIDDEN, 3, ()),  # which is a right pair here
        ("host.only-rank-0-backs-up", Outcome.IDLE, 0, ()),
        ("host.draft-index-stays", Outcome.ERROR, 0, ("host.draft_accepts_alike",)),  # wrong, but not by the fault
    ],
)
def test_a_fault_meets_its_fate(
    name: str, outcome: Outcome, runs: int, failed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that are wrong are caught when the fault was run, right ones survive; only what is named is started."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = table(written(tmp_path, (name, 'expected = "hidden"\nreason = "a test"')), FAULTS, IDS)
    its = fates(found, found.fault, FEW, tmp_path / "logs", seed=1)[0]

    assert (outcome, runs, failed) == (its.outcome, its.runs, its.cases), its
    assert bool(failed) == ("passes that verified a draft" in its.seen)


def test_servers_that_do_not_start_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which worker ended, and how; nothing is caught by that."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = table(written(tmp_path, (DIES, 'expected = "hidden"\nreason = "a test"')), FAULTS, IDS)
    its = fates(found, found.fault, FEW, tmp_path / "logs", seed=1)[0]

    assert (Outcome.ERROR, "worker 'pair' ended with exit code 1 before it was ready") == (its.outcome, its.why)


def result(verdict: Verdict, name: str = "some.case") -> CaseResult:
    failure = Failure(claim="", seen="a", expected="b", why="", config="", ops=(), replay="")
    return CaseResult(case=name, verdict=verdict, why="so", failure=failure if verdict is Verdict.FAIL else None)


PLANTED, RUN, AGAIN = "fault x.y is planted\n", "fault x.y was run 2 times\n", STARTED_AGAIN.decode()


@pytest.mark.parametrize(
    ("verdicts", "log", "outcome", "why"),
    [
        ([Verdict.PASS, Verdict.FAIL], 2 * PLANTED + 2 * RUN, Outcome.CAUGHT, ""),
        ([Verdict.PASS, Verdict.UNKNOWN], PLANTED + RUN, Outcome.HIDDEN, "some.case unknown: so"),
        ([Verdict.SKIP], PLANTED + RUN, Outcome.ERROR, "no case has passed or failed"),
        ([Verdict.PASS, Verdict.ERROR], PLANTED + RUN, Outcome.ERROR, "some.case: so"),
        ([Verdict.PASS], "", Outcome.ERROR, "0 ranks planted it, 0 told how often it was run"),
        ([Verdict.FAIL], 2 * PLANTED + RUN, Outcome.ERROR, "2 ranks planted it, 1 told how often it was run"),
        ([Verdict.FAIL], 2 * PLANTED + AGAIN + 2 * PLANTED + 2 * RUN, Outcome.CAUGHT, ""),  # after two that were killed
        ([Verdict.FAIL], 2 * (PLANTED + RUN) + AGAIN + 2 * PLANTED, Outcome.ERROR, "2 ranks planted it, 0 told"),
        ([Verdict.FAIL], PLANTED.replace("x", "z") + RUN, Outcome.ERROR, "0 ranks planted it, 1 told how often"),
    ],
)
def test_what_results_and_logs_come_to(verdicts: list[Verdict], log: str, outcome: Outcome, why: str) -> None:
    """No fault is caught or survives that was not planted in every rank, and nothing passes by absence."""
    its = judged("x.y", [result(verdict) for verdict in verdicts], [log])

    assert outcome is its.outcome
    assert its.why.startswith(why)


def entry(expected: str) -> Entry:
    return msgspec.convert({"id": "x.y", "workers": ["p"], "expected": expected}, Entry)


@pytest.mark.parametrize(
    ("expected", "outcome", "exit_code"),
    [
        ("caught", Outcome.CAUGHT, 0),
        ("hidden", Outcome.HIDDEN, 0),
        ("caught", Outcome.HIDDEN, 1),
        ("hidden", Outcome.CAUGHT, 1),
        ("caught", Outcome.IDLE, 2),
        ("hidden", Outcome.IDLE, 2),
        ("caught", Outcome.ERROR, 3),
        ("hidden", Outcome.ERROR, 3),
    ],
)
def test_the_exit_code_tells(expected: str, outcome: Outcome, exit_code: int) -> None:
    """Only what is expected is 0."""
    assert exit_code == code([entry(expected)], [Fate(id="x.y", outcome=outcome, runs=1)])


@pytest.mark.parametrize(
    ("fault", "more", "message"),
    [
        ("host.restore-without-daft", CAUGHT[1], "is in no library; did you mean 'host.restore-without-draft'?"),
        (CAUGHT[0], 'expected = "caught"', "is expected to be caught by no case; name in `cases`"),
        (CAUGHT[0], 'expected = "hidden"', "is expected to be hidden and has no reason; say in `reason`"),
        (CAUGHT[0], 'expected = "seen"', "Invalid enum value 'seen' - at `$.fault[0].expected`"),
        (CAUGHT[0], 'expected = "caught"\ncases = ["host.drafts"]', "there is no case 'host.drafts' in the suite"),
        (CAUGHT[0], CAUGHT[1] + '\nenf = "x"', "unknown field `enf`"),
        (CAUGHT[0], CAUGHT[1] + "\n]", "no TOML: "),
    ],
)
def test_a_wrong_table_is_told(fault: str, more: str, message: str, tmp_path: Path) -> None:
    """File, fault, value and what to do are on one line."""
    path = written(tmp_path, (fault, more))
    with pytest.raises(UserError) as told:
        table(path, FAULTS, IDS)

    assert str(told.value).startswith(f"{path}: ")
    assert message in str(told.value)


def test_wrong_usage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3 and one line, before anything is started."""
    words = ["--table", str(written(tmp_path, CAUGHT))]
    for more, message in (
        (["--only", "host.restore"], f"--only host.restore: not in the table; did you mean '{CAUGHT[0]}'?"),
        (["--markdown", "no/such/page.md"], "--markdown no/such/page.md: expected a file in a folder that exists"),
    ):
        assert main([*words, *more]) == 3
        told = capsys.readouterr().err
        assert told.startswith(f"e2e_faults: {message}")
        assert told.count("\n") == 1


def test_names_that_do_not_exist_are_told(tmp_path: Path) -> None:
    """A worker, an id of --only and an address without workers."""
    found = table(written(tmp_path, CAUGHT), FAULTS, IDS)
    with pytest.raises(UserError, match=r"--only host.restore: not in the table; did you mean 'host.restore-w"):
        chosen(found, ["host.restore"])
    with pytest.raises(UserError, match="worker 'unneeded'; expected one that the address names: pair"):
        table(written(tmp_path, CAUGHT, workers='["unneeded"]'), FAULTS, IDS)
    with pytest.raises(UserError, match="names no worker"):
        table(written(tmp_path, CAUGHT, head='topology = "set.toml"\naddress = "http://here:1"\n'), FAULTS, IDS)
    with pytest.raises(UserError, match="no such file: cannot be read: No such file"):
        table(Path("no such file"), FAULTS, IDS)


def test_kept_results_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the record has is told and written to the page, and its outcome counts."""
    kept = [Fate(id=CAUGHT[0], outcome=Outcome.HIDDEN, runs=2, passed=17, seconds=9.0)]
    (tmp_path / "record").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in kept))
    words = ["--table", str(written(tmp_path, CAUGHT)), "--record", str(tmp_path / "record")]

    assert main([*words, "--markdown", str(tmp_path / "page.md")]) == 1
    told = capsys.readouterr().out
    assert told == f"survived      {CAUGHT[0]} in pair  9 s  17 cases passed  EXPECTED CAUGHT\n"
    assert f"Not as expected: `{CAUGHT[0]}`." in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("wrong", "tried"),
    [
        ("", [[CAUGHT[0]], [*HIDDEN]]),
        (HIDDEN[1], [[CAUGHT[0]], [*HIDDEN], [HIDDEN[0]], [HIDDEN[1]]]),
    ],
)
def test_what_is_hidden_shares_servers(
    wrong: str, tried: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that cannot be seen is planted at once; when something is seen, each gets servers of its own."""
    calls = []

    def planted(found: Table, entries: Sequence[Entry], cases: object, log_dir: object, seed: int) -> list[Fate]:
        ids = [each.id for each in entries]
        calls.append(ids)
        outcome = Outcome.CAUGHT if {wrong, CAUGHT[0]} & set(ids) else Outcome.HIDDEN
        return [Fate(id=name, outcome=outcome, runs=1) for name in ids]

    monkeypatch.setattr("ci.e2e_faults.fates", planted)
    hidden = [(name, 'expected = "hidden"\nreason = "a test"') for name in HIDDEN]

    assert int(bool(wrong)) == main(["--table", str(written(tmp_path, *hidden, CAUGHT))])
    assert tried == calls


def test_servers_get_what_their_entries_say(tmp_path: Path) -> None:
    """Ids with commas between, variables, and, where nothing must be seen, the patient arguments."""
    head = f'topology = "{tmp_path}/set.toml"\naddress = "{ADDRESS}"\npatient = ["--wait", "9"]\n'
    hidden = [(name, 'expected = "hidden"\nreason = "a test"\nenv = { LEVEL = "1" }') for name in HIDDEN]
    found = table(written(tmp_path, CAUGHT, *hidden, head=head), FAULTS, IDS)
    caught, both = (topology(found, entries).workers for entries in (found.fault[:1], found.fault[1:]))

    assert ["pair"] == [worker.name for worker in both]
    assert {"KVSHARD_FAULT": CAUGHT[0]} == caught[0].env
    assert {"KVSHARD_FAULT": ",".join(HIDDEN), "LEVEL": "1"} == both[0].env
    assert (*caught[0].command, "--wait", "9") == both[0].command


def test_the_table_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fault, case and worker of the project's table exists, and both kinds are in it."""
    monkeypatch.chdir(ROOT)
    found = table(TABLE, FAULTS, IDS)

    assert {"caught", "hidden"} == {each.expected for each in found.fault}
    assert len(found.fault) >= 12
