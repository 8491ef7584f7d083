"""The table of runners, and what lint finds in registrations that parse."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from ci import runners
from ci.lint import lint
from ci.register import register_cpu_ci
from ci.registry import scan
from ci.runners import Runners, RunnersError, read

register_cpu_ci(est_time=10, stage="commit")

TABLE = """
[defaults]
file_seconds = 50
job_seconds = 100
[runner.ubuntu-latest]
labels = ["ubuntu-latest"]
[runner.two]
labels = ["self-hosted", "two"]
gpu = "H100"
gpus = 2
file_seconds = 60
install = "ci/gpu.sh"
"""
DAY = dt.date(2026, 12, 1)


def table(folder: Path, text: str = TABLE) -> Runners:
    (folder / "runners.toml").write_text(text)
    return read(folder / "runners.toml")


def found(folder: Path, text: str, *, require: bool = False) -> list[str]:
    """What lint tells of a tree with this one file, without the path."""
    (folder / "ci").mkdir(exist_ok=True)
    (folder / "ci" / "gpu.sh").touch()
    (folder / "test_a.py").write_text(text)
    return [str(problem) for problem in lint(scan(folder), table(folder), DAY, require=require)]


def test_defaults(tmp_path: Path) -> None:
    """A runner has the defaults of the table but for its own keys."""
    made = table(tmp_path)
    assert (50, 100, 0) == (
        made["ubuntu-latest"].file_seconds,
        made["ubuntu-latest"].job_seconds,
        made["ubuntu-latest"].gpus,
    )
    assert (60, 100, 2) == (made["two"].file_seconds, made["two"].job_seconds, made["two"].gpus)


def test_own_table() -> None:
    """The table that comes with the project can be read, and its scripts exist."""
    made = read()
    root = Path(runners.__file__).parent.parent
    assert "ubuntu-latest" in made
    assert [] == [runner.name for runner in made.values() if runner.install and not (root / runner.install).is_file()]


def test_unknown_name(tmp_path: Path) -> None:
    """An unknown runner is an error with the nearest name."""
    with pytest.raises(RunnersError, match="no runner 'tow'; did you mean 'two'"):
        table(tmp_path).named("tow")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = [", "Invalid"),
        ("", "has no"),
        ("[runners.a]\nlabels = ['a']", "has runners"),
        ("[runner.a]", "labels = None; expected a list of strings"),
        ("[runner.a]\nlabels = []", "at least one"),
        ("[runner.a]\nlabels = ['a']\nlabel = 'b'", "label = 'b'; expected one of labels, gpu"),
        ("[runner.a]\nlabels = ['a; rm']", "labels"),
        ("[runner.a]\nlabels = ['a', 1]", "expected strings"),
        ("[runner.a]\nlabels = ['a']\nmax_parts = '2'", "max_parts = '2'; expected a whole number"),
        ("[runner.a]\nlabels = ['a']\nmax_parts = true", "max_parts = True; expected a whole number"),
        ("[runner.a]\nlabels = ['a']\nname = 'b'", "name = 'b'; expected one of"),
        ("[runner]\na = 1", "expected [defaults] and [runner.NAME] tables"),
        ("defaults = 1\n[runner.a]\nlabels = ['a']", "expected [defaults] and [runner.NAME] tables"),
        ("[runner.'a b']\nlabels = ['a']", "labels"),
        ("[runner.a]\nlabels = ['a']\ninstall = 'a.sh; rm -rf x'", "install"),
        ("[runner.a]\nlabels = ['a']\ninstall = '../a.sh'", "install"),
        ("[runner.a]\nlabels = ['a']\ngpus = 1", "gpus"),
        ("[runner.a]\nlabels = ['a']\ngpu = 'H100'", "gpus"),
        ("[runner.a]\nlabels = ['a']\nfile_seconds = 5000", "file_seconds"),
        ("[runner.a]\nlabels = ['a']\nmax_parts = 257", "max_parts"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, says: str) -> None:
    """What would end up wrong in a workflow or a shell is refused, with the file and the key."""
    with pytest.raises(RunnersError) as caught:
        table(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "runners.toml"))
    assert says in str(caught.value)


def test_clean(tmp_path: Path) -> None:
    """A right registration has no problem, nor has a disabled one before its date."""
    off = 'disabled="hangs https://x.y 2026-12-02"'
    text = f'register_gpu_ci(est_time=60, stage="s", runner="two")\nregister_cpu_ci(est_time=50, stage="s", {off})\n'
    assert [] == found(tmp_path, text)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ('register_gpu_ci(est_time=1, stage="s", runner="tow")', "runner 'tow'; expected one of ubuntu-latest, two"),
        ('register_gpu_ci(est_time=61, stage="s", runner="two")', "est_time 61 s; expected at most 60 s on two; split"),
        ('register_cpu_ci(est_time=1, stage="s", runner="two")', "use register_gpu_ci, or another runner"),
        ('register_gpu_ci(est_time=1, stage="s", runner="ubuntu-latest")', "use register_cpu_ci, or another runner"),
        ('register_cpu_ci(est_time=1, stage="s", disabled="x https://x.y 2026-12-01")', "disabled until 2026-12-01: x"),
        ("register_cpu_ci(est_time=1)", "without stage"),
    ],
)  # fmt: skip  # one case a line
def test_problems(tmp_path: Path, call: str, says: str) -> None:
    """Each problem is told with its file and line."""
    (told,) = found(tmp_path, f"\n{call}\n")
    assert told.startswith("test_a.py:2: ")
    assert says in told


def test_missing_script(tmp_path: Path) -> None:
    """An install script that is not there is found before a job starts without it."""
    made = table(tmp_path)
    (tmp_path / "test_a.py").write_text('register_gpu_ci(est_time=1, stage="s", runner="two")')
    assert ["install = 'ci/gpu.sh' of runner 'two'"] == [problem.value for problem in lint(scan(tmp_path), made, DAY)]


def test_same_labels(tmp_path: Path) -> None:
    """A file on two runners that only their names tell apart is a problem: a command runs it on one of them twice."""
    (tmp_path / "runners.toml").write_text(TABLE + '[runner.more]\nlabels = ["ubuntu-latest"]\n')
    call = 'register_cpu_ci(est_time=1, stage="s", runner="{}")\n'
    (tmp_path / "test_a.py").write_text(call.format("ubuntu-latest") + call.format("more"))
    (tmp_path / "test_b.py").write_text(call.format("more"))
    (told,) = lint(scan(tmp_path), read(tmp_path / "runners.toml"), DAY)
    assert str(told).startswith("test_a.py:2: runner 'more' beside 'ubuntu-latest', which has the same labels")


def test_require(tmp_path: Path) -> None:
    """An unregistered test file is a problem where registration is required."""
    assert [] == found(tmp_path, "def test(): ...")
    assert 1 == len(found(tmp_path, "def test(): ...", require=True))


@pytest.mark.parametrize(
    ("estimate", "took", "problems"),
    [(45, 45, 0), (45, 16, 0), (45, 14, 1), (45, 134, 0), (45, 136, 1), (1, 15, 0), (1, 17, 1), (16, 2, 0)],
)
def test_estimates(tmp_path: Path, estimate: int, took: float, problems: int) -> None:
    """An estimate that is wrong by more than three times is a problem, unless it is a matter of seconds."""
    (tmp_path / "test_a.py").write_text(f'register_cpu_ci(est_time={estimate}, stage="s")')
    timings = {"ubuntu-latest": {"test_a.py": took}, "two": {"test_a.py": 1000.0}}
    made = lint(scan(tmp_path), table(tmp_path), DAY, timings=timings)
    assert problems == len(made)
    assert all(f"write est_time={took:g}" == problem.step for problem in made)
