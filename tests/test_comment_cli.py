"""`kvshard ci comment`, its workflow, and what the handler imports."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ci import comment_cli, tidy
from ci.github import Client
from ci.register import register_cpu_ci
from tests.comment_rig import EVENTS, FILES, SHA, SIX, TABLE, TOKEN, event, recorded, sample_github
from tests.fake_github import serving

register_cpu_ci(est_time=10, stage="commit")

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "comment.yml"
RUNNERS = """
[runner.ubuntu-latest]
labels = ["ubuntu-latest"]
[runner.4-gpu-gb300]
labels = ["4-gpu-gb300"]
gpu = "GB300"
gpus = 4
"""
HANDLER = (*sorted((ROOT / "ci").glob("comment_*.py")), ROOT / "ci" / "github.py")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkout of the pull request, with the tables beside it."""
    for name, text in FILES.items():
        if "/many/" not in name:
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / name).write_text(text)
    (tmp_path / "tree" / ".git").mkdir()
    (tmp_path / "tree" / ".git" / "HEAD").write_text(f"{SHA}\n")
    (tmp_path / "permissions.toml").write_text(TABLE)
    (tmp_path / "runners.toml").write_text(RUNNERS)
    return tmp_path


def run(place: Path, told: Path | dict[str, Any], *more: str) -> int:
    file = told if isinstance(told, Path) else place / "event.json"
    if isinstance(told, dict):
        file.write_text(json.dumps(told))
    tables = ["--permissions", str(place / "permissions.toml"), "--runners", str(place / "runners.toml")]
    return comment_cli.main(["--event", str(file), "--tree", str(place / "tree"), *tables, *more])


class TestDryRun:
    @pytest.mark.parametrize(
        ("name", "jobs", "line"),
        [
            ("one_file", {"ubuntu-latest": ["suites/e2e/test_cache.py"]}, "🚀 `ubuntu-latest` (1 test, about 1 min): "),
            (
                "changed",
                {"4-gpu-gb300": ["suites/e2e/test_gather.py"], "ubuntu-latest": SIX},
                "🚀 `ubuntu-latest` (6 tests, ",
            ),
            ("refused", {}, "⛔ `suites/e2e/test_unregistered.py`: it is registered nowhere"),
            ("stranger", None, "⛔ `/rerun-test test_cache.py`: no permission: "),
        ],
    )
    def test_recorded(
        self, place: Path, capsys: pytest.CaptureFixture[str], name: str, jobs: dict[str, list[str]] | None, line: str
    ) -> None:
        """A recorded event is played offline, and its plan and reply are printed."""
        assert 0 == run(place, EVENTS / f"{name}.json", "--dry-run")
        said = capsys.readouterr().out
        assert line in said
        plan = re.search(r"plan:\n(\{.*?\n\})\nreply:", said, re.DOTALL)
        assert (jobs is None) == (plan is None)
        if plan is not None:
            assert jobs == {job["runner"]: job["files"] for job in json.loads(plan[1])["dispatches"]}

    def test_failed_runs(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Recorded runs are those that would run again."""
        told = event("/rerun-failed-ci", author_association="OWNER")
        run_of = {
            "id": 9,
            "name": "Lint",
            "path": "a.yml",
            "event": "pull_request",
            "html_url": "https://x",
            "run_attempt": 1,
        }
        told["recorded"] = {"runs": [{**run_of, "status": "completed", "conclusion": "failure"}]}
        assert 0 == run(place, told, "--dry-run")
        assert "🚀 `Lint`: 🔁 started again" in capsys.readouterr().out

    def test_no_command(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A comment without a command comes to nothing."""
        assert 0 == run(place, event("Nice."), "--dry-run")
        assert "outcome: no command in the comment\n" == capsys.readouterr().out


class TestLive:
    def test_dispatch(self, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """With an API it is sent, with the token of the environment, which is not printed."""
        monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
        with serving(sample_github()) as github:
            assert 0 == run(place, recorded("one_file"), "--api", github.url)
            assert 1 == len(github.dispatches)
            assert f"Bearer {TOKEN}" == github.headers[0]["Authorization"]
        assert ("answered\n", "") == capsys.readouterr()

    def test_new_commits(self, place: Path) -> None:
        """A checkout of another commit than the pull request's head is not planned."""
        (place / "tree" / ".git" / "HEAD").write_text("0" * 40)
        with serving(sample_github()) as github:
            assert 0 == run(place, recorded("one_file"), "--api", github.url)
            assert [] == github.dispatches
            assert "has got new commits" in github.replies[0]

    def test_recorded_values_are_for_dry_runs(self, place: Path) -> None:
        """What an event file says under `recorded` gives nobody rights on a live server."""
        told = recorded("one_file")
        told["comment"]["user"]["login"] = "stranger"
        with serving(sample_github()) as github:
            assert 0 == run(place, told, "--api", github.url)
            assert [] == github.dispatches

    def test_no_reply(self, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """Without any way to reply the command fails, so that the job is red."""
        with serving(sample_github()) as github:
            url = github.url
        monkeypatch.setattr(comment_cli, "Client", partial(Client, budget_s=0.5))
        assert 1 == run(place, recorded("one_file"), "--api", url)
        assert "no answer" in capsys.readouterr().err


class TestUsage:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("{", "Expecting"),
            ("[]", "no JSON object"),
            ("{}", "no event of a repository"),
            ('{"repository": {"full_name": "a b"}}', "no event"),
            ("[" * 100_000, ""),
        ],
    )
    def test_events(self, place: Path, capsys: pytest.CaptureFixture[str], content: str, said: str) -> None:
        """A file that is no event is wrong usage."""
        (place / "event.json").write_text(content)
        assert 3 == run(place, place / "event.json", "--dry-run")
        assert said in capsys.readouterr().err

    def test_no_file(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """So is one that is not there."""
        assert 3 == run(place, place / "nothing.json", "--dry-run")
        assert "nothing.json" in capsys.readouterr().err

    def test_plain_http(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """And an API without https."""
        assert 3 == run(place, recorded("one_file"), "--api", "http://example.com")
        assert "https only" in capsys.readouterr().err

    @pytest.mark.parametrize("words", [[], ["--evnt", "x"]])
    def test_arguments(self, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
        """And arguments that do not exist, on its own as in `kvshard ci comment`."""
        with pytest.raises(SystemExit) as ended:
            comment_cli.main(words)
        assert 3 == ended.value.code
        assert "required: --event; see" in capsys.readouterr().err


class TestImports:
    @pytest.mark.parametrize("path", HANDLER, ids=lambda path: path.stem)
    def test_standard_library(self, path: Path) -> None:
        """The handler imports the standard library, itself, the registry and the table of runners."""
        allowed = {*sys.stdlib_module_names, "ci"}
        source = tidy.Source(path.name, f"ci.{path.stem}", path.read_text(), ast.parse(path.read_text()))
        modules = {made.module for made in tidy.imports(source, frozenset({"ci.runners"}))}
        assert set() == {module for module in modules if module.partition(".")[0] not in allowed}
        own = {module for module in modules if module.startswith("ci.")}
        assert own <= {"ci.registry", "ci.runners", "ci.github", *(f"ci.{file.stem}" for file in HANDLER)}

    def test_light(self, place: Path) -> None:
        """The whole handler runs where nothing but Python is installed, in a new process as the workflow starts it."""
        tables = ["--permissions", str(place / "permissions.toml"), "--runners", str(place / "runners.toml")]
        words = ["--event", str(EVENTS / "one_file.json"), "--tree", str(place / "tree"), "--dry-run", *tables]
        bare = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-S", "-m", "ci.comment_cli", *words]  # -S: without what is installed
        done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, check=False)
        assert (0, "") == (done.returncode, done.stderr)
        assert "🚀 `ubuntu-latest` (1 test, about 1 min)" in done.stdout

    def test_one_parser(self) -> None:
        """Registrations are read by the registry alone."""
        assert [] == [
            path.name
            for path in HANDLER
            if "register_" in path.read_text().replace("call `register_", "").replace("or `register_", "")
        ]


@pytest.mark.skipif(not WORKFLOW.exists(), reason="an archive of the source holds no workflows")
class TestWorkflow:
    TEXT = WORKFLOW.read_text() if WORKFLOW.exists() else ""

    def test_actions_are_pinned(self) -> None:
        """Every action is pinned by a full hash, with its version behind it."""
        uses = re.findall(r"uses: (.*)", self.TEXT)
        assert 3 == len(uses)
        assert [] == [line for line in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)]

    def test_no_expression_in_a_shell_step(self) -> None:
        """No `run` holds an expression of the workflow, so no comment can become a command."""
        runs = re.findall(r"^ +(?:- )?run: (.*)", self.TEXT, re.MULTILINE)
        assert 1 == len(runs)
        assert [] == [line for line in runs if "${{" in line or line.strip() in {"|", ">"}]

    def test_least_permissions(self) -> None:
        """Nothing by default; the job writes actions, issues and pull requests, and reads contents."""
        assert "\npermissions: {}\n" in self.TEXT
        granted = set(re.findall(r"^      ([\w-]+): (read|write)\b", self.TEXT, re.MULTILINE))
        assert {("actions", "write"), ("contents", "read"), ("issues", "write"), ("pull-requests", "write")} == granted

    def test_no_credentials_in_the_checkouts(self) -> None:
        """Neither checkout keeps the token; the handler is that of the default branch."""
        assert self.TEXT.count("actions/checkout@") == self.TEXT.count("persist-credentials: false")
        assert "ref: ${{ github.event.repository.default_branch }}" in self.TEXT
