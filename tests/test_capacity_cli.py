"""`kvshard capacity` on the command line: results, exit codes, one-line errors, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.capacity_cli import main
from harness.traffic import generate

register_cpu_ci(est_time=10, stage="commit")

ROOT = Path(__file__).parents[1]
SMALL = ["--generate", "60", "--shards", "2,4", "--memory-per-rank", "1GiB,2GiB", "--context", "65536"]
LINE = '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}\n'


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_table_of_generated_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a trace the traffic is generated, and the title says so; every layout has its rows."""
    assert main(SMALL) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("generated traffic, seed 0: 60 requests, ")
    names = [line.split("  ")[0][1:] for line in shown.out.splitlines() if line.startswith((" replicated", " sharded"))]
    assert names == (["replicated"] * 2 + ["sharded N=2"] * 2 + ["sharded N=4"] * 2) * 2  # two tables
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "bound: an infinite cache hits" in shown.out
    assert shown.err == ""  # no progress bar without a terminal


def test_json_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report as JSON has the bound, the sizing and one row per layout and memory, and leaves no other file."""
    assert main([*SMALL, "--seed", "3", "--requests", "40", "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    requests = list(generate(3, 40))
    assert (report["generated"], report["engine"], report["requests"]) == (True, "ref", 40)
    assert report["input_tokens"] == sum(request.input_length for request in requests)
    assert [(each["shards"], each["memory_bytes"] >> 30) for each in report["rows"]] == [
        (shards, memory) for shards in (1, 2, 4) for memory in (1, 2)
    ]
    for each in report["rows"]:
        assert 0 < each["replay"]["hit_tokens"] <= report["bound"]["hit_tokens"]
    assert files(tmp_path) == ["r.json"]


def test_trace_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace names the title; identical prompts hit all whole pages but the last token's."""
    trace = tmp_path / "t.jsonl"
    trace.write_text(LINE * 3)
    assert main([str(trace), "--json", str(tmp_path / "r.json"), "--shards", "2", "--memory-per-rank", "2GiB"]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["title"], report["generated"]) == ("t.jsonl: 3 requests, 1,800 input tokens", False)
    assert [each["replay"]["hit_tokens"] for each in report["rows"]] == [2 * 576, 2 * 576]


def test_scratch_that_does_not_fit_is_told_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    """A layout without room for scratch has an empty row and a line with the numbers; the others are replayed."""
    assert main(["--generate", "5", "--shards", "2", "--memory-per-rank", "1GiB"]) == 0
    assert "sharded N=2 at 1 GiB: scratch does not fit: 1.394 GiB of 1.000 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--page-size", "96"], "page size 96 does not divide 512"),
        (["--page-size", "0"], "--page-size '0': expected a whole number of at least 1"),
        (["--shards", "1"], "--shards '1': expected a whole number of at least 2"),
        (["--shards", "2,,4"], "--shards ''"),
        (["--memory-per-rank", "8GB"], "--memory-per-rank '8GB': expected a size such as 8GiB"),
        (["--memory-per-rank", "0GiB"], "--memory-per-rank '0GiB'"),
        (["--seed", "-1"], "--seed '-1'"),
        (["--in-flight", "0"], "--in-flight '0'"),
        (["--jobs", "two"], "--jobs 'two'"),
        (["--requests", "0"], "--requests '0'"),
        (["--generate", ""], "--generate ''"),
        (["--seed", ""], "--seed ''"),
        (["--json", "absent/r.json"], "--json 'absent/r.json': expected a regular file in a folder that exists"),
        (["--json", "/dev/null"], "--json '/dev/null': expected a regular file"),
        (["--plot", "r.pdf"], "--plot 'r.pdf': expected a file name that ends with .png"),
        (["absent.jsonl"], "absent.jsonl: cannot be read: No such file or directory"),
        (["absent.jsonl", "--seed", "1"], "absent.jsonl: --seed and --generate are for generated traffic"),
    ],
)
def test_bad_input_is_one_line(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad option or file is exit code 3 and one line on stderr that says what was expected; no table."""
    assert main(options) == 3
    shown = capsys.readouterr()
    assert shown.err.startswith("kvshard capacity: ")
    assert reason in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_malformed_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A malformed line is named, exit code 3, and no report is written."""
    trace = tmp_path / "t.jsonl"
    trace.write_text(LINE + LINE.replace("600", "1600"))
    assert main([str(trace), "--json", str(tmp_path / "r.json")]) == 3
    assert "t.jsonl line 2: has 2 hash_ids; expected 4" in capsys.readouterr().err
    assert files(tmp_path) == ["t.jsonl"]


def test_no_layout_that_fits_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    """When nothing could be replayed the exit code is 3, and the table says why."""
    assert main(["--generate", "5", "--shards", "2", "--memory-per-rank", "1MiB"]) == 3
    shown = capsys.readouterr()
    assert "replicated at 0.000976562 GiB: no page fits" in shown.out
    assert shown.err.startswith("kvshard capacity: no layout fits")


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--plot writes a PNG and no other file."""
    pytest.importorskip("matplotlib", reason="the optional extra `plot` is not installed")
    assert main([*SMALL, "--plot", str(tmp_path / "r.png")]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert files(tmp_path) == ["r.png"]


def test_plot_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra, --plot is refused before the replay with the command that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*SMALL, "--plot", str(tmp_path / "r.png")]) == 3
    assert "pip install 'kvshard[plot]'" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_a_link_stays_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report written through a symbolic link replaces the file it leads to."""
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    (tmp_path / "real.json").write_text("old")
    assert main([*SMALL, "--json", str(tmp_path / "link.json")]) == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["requests"] == 60


STUCK_ENGINE = """
import sys, time
from harness.adapters.ref_index import RefIndexEngine

class StuckEngine(RefIndexEngine):
    def cache(self, shards, page_size, pages_per_rank):
        print("started", file=sys.stderr, flush=True)
        time.sleep(600)
"""
STUCK_RUN = """
import argparse, sys
from harness.capacity_cli import add_arguments, run
from stuck_engine import StuckEngine
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(run(parser.parse_args(), StuckEngine()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_behind(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """Ctrl-C, and even a killed parent, end the worker processes, and no file is left, whole or half."""
    (tmp_path / "stuck_engine.py").write_text(STUCK_ENGINE)
    (tmp_path / "out").mkdir()
    command = [
        sys.executable,
        "-c",
        STUCK_RUN,
        "--generate",
        "5",
        "--jobs",
        "2",
        "--json",
        str(tmp_path / "out/r.json"),
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        try:
            assert [process.stderr.readline() for _ in range(2)] == ["started\n"] * 2
            if sent == signal.SIGINT:
                os.killpg(process.pid, sent)  # a terminal sends it to all
            else:
                process.send_signal(sent)
            # every worker holds this pipe: it ends when the last one is gone
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == code
    assert said == ("kvshard capacity: interrupted\n" if sent == signal.SIGINT else "")
    assert files(tmp_path / "out") == []
