"""`kvshard gate run --runner sgl-eval`: the program itself where it is installed, and one that behaves badly."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from ci.register import register_cpu_ci
from harness.cli import main
from harness.samples import State, read
from tests.fake_openai import Said, prompt_of, serving, until

register_cpu_ci(est_time=60, stage="commit")

Capture = pytest.CaptureFixture[str]
needs_sgl_eval = pytest.mark.skipif(
    shutil.which("sgl-eval") is None, reason="needs the program sgl-eval on PATH: pip install sgl-eval==0.1.3"
)
# what a run of the program leaves: two problems, one of them asked in vain
ROW = '{"problem": "%s", "expected_answer": "7", "generation": "%s", "symbolic_correct": %s, "finish_reason": "%s"}'
WRITES = f"""
import pathlib, sys, time
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--out-dir") + 1]) / "sgl_eval_run"
folder.mkdir()
rows = ['{ROW % ("a", "7", "true", "stop")}', '{ROW % ("b", "%s", "false", "%s")}']
(folder / "output-rs0.jsonl").write_text("\\n".join(rows) + "\\n")
print(words, "\\nSampler exception (trial 1/6), backing off 1s: HTTP 500")
"""
FAILED, EMPTY, WRONG = WRITES % ("", "error"), WRITES % ("", "stop"), WRITES % ("8", "stop")
HANGS = "import time\nprint('it hangs', flush=True)\ntime.sleep(600)\n"


def asked(url: str, out: Path, *words: str) -> int:
    given = ["gate", "run", "--runner", "sgl-eval", "--engine", url, "--out", str(out), "--task", "aime25"]
    return main([*given, *words])


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in, which a test writes."""
    found = tmp_path / "bin" / "sgl-eval"
    found.parent.mkdir()
    monkeypatch.setenv("PATH", str(found.parent))
    monkeypatch.setattr("sys.executable", str(tmp_path / "no" / "python"))
    return found


def does(program: Path, text: str) -> None:
    program.write_text(f"#!{os.path.realpath('/proc/self/exe')}\n{text}")
    program.chmod(0o755)


@needs_sgl_eval
def test_aime_2025(tmp_path: Path, capsys: Capture) -> None:
    """The program's own thirty problems, offline; what is right, wrong, cut off, empty and refused is told apart."""

    def answer(body: dict[str, object]) -> Said:
        prompt = prompt_of(body)
        if "integer bases" in prompt:
            return Said(r"so \boxed{70}")  # which is right
        if "baseball team" in prompt:
            return Said("so it goes", "length")
        if "heptagon" in prompt:
            return Said("")
        return Said(status=400, raw="{}") if "ordered pairs" in prompt else Said(r"\boxed{1000}")

    with serving(answer) as fake:
        assert 2 == asked(fake.url, tmp_path / "few.jsonl", "--limit", "4", "--repeats", "2", "--temperature", "0.6")
        assert (
            "4 of 8 requests failed (50.0 %); at most 1 % may; one of them: Error code: 400" in capsys.readouterr().err
        )
        assert 0 == asked(fake.url, tmp_path / "all.jsonl", "--unjudged-max", "10", "--max-tokens", "64")
    few, whole = read(tmp_path / "few.jsonl"), read(tmp_path / "all.jsonl")
    assert (4, 8, 4, 2) == (len(few.answers), len(few.all), few.count(State.ERROR), few.count(State.TRUNCATED))
    assert (30, 1, set()) == (
        len(whole.answers),
        sum(each.correct for each in whole.all),
        few.answers - whole.answers.keys(),
    )
    assert {("fake", 64)} == {(body["model"], body["max_tokens"]) for body in fake.bodies[8:]}
    assert "aime25 by sgl-eval, 30 items: 1 of " in capsys.readouterr().out
    words = ["gate", "compare", str(tmp_path / "all.jsonl"), str(tmp_path / "all.jsonl"), "--margin", "20"]
    assert 0 == main([*words, "--unjudged-max", "10"])


def test_what_it_is_asked(tmp_path: Path, program: Path, capsys: Capture) -> None:
    """Options have its names; the result is samples of kvshard's, and its own files stay beside them."""
    does(program, WRONG)
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    out = tmp_path / "new.jsonl"
    with serving(lambda _: Said()) as fake:
        assert 0 == asked(fake.url, out, "--limit", "2", "--concurrency", "3", "--data", str(data), "--max-tokens", "9")
    assert "aime25 by sgl-eval, 2 items: 1 of 2 right (50.0 %), 0 cut off, 0 failed" in capsys.readouterr().out
    words, _ = (tmp_path / "new.jsonl.sgl-eval" / "sgl-eval.log").read_text().splitlines()
    expected = f"['run', 'aime25', '--base-url', '{fake.url}/v1', '--model', 'fake', '--out-dir', '{out}.sgl-eval', "
    expected += "'--num-threads', '3', '--n-repeats', '1', '--num-examples', '2', '--max-tokens', '9', '--top-p', '1', "
    assert f"{expected}'--from-dataset', '{data}'] " == words
    assert [True, False] == [each.correct for each in read(out).all]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (FAILED, "1 of 2 requests failed (50.0 %); at most 1 % may; one of them: HTTP 500; the samples are in "),
        (EMPTY, "1 of 2 requests failed (50.0 %); at most 1 % may; one of them: empty response; the samples are in "),
        ("import sys\nsys.exit('no such thing')", "sgl-eval ended with 1: no such thing; what was answered is in "),
        ("", "sgl-eval wrote 0 runs, expected one: it wrote nothing"),
        (HANGS, "sgl-eval had no answer for 1 s: it hangs; what was answered is in "),
    ],
)
def test_a_run_that_fails(tmp_path: Path, program: Path, capsys: Capture, text: str, says: str) -> None:
    """Says what happened, on one line, and leaves no process."""
    does(program, text)
    with serving(lambda _: Said()) as fake:
        assert 2 == asked(fake.url, tmp_path / "new.jsonl", "--timeout", "1")
    assert (True, 1) == (says in (said := capsys.readouterr().err), said.count("\n"))
    assert [] == psutil.Process().children(recursive=True)


def test_an_interrupted_run(tmp_path: Path, program: Path, capsys: Capture) -> None:
    """Ctrl-C ends the program too, and says where its answers are."""
    does(program, HANGS)
    log = tmp_path / "new.jsonl.sgl-eval" / "sgl-eval.log"

    def interrupt() -> None:
        until(lambda: log.exists() and "hangs" in log.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with serving(lambda _: Said()) as fake:
        assert 130 == asked(fake.url, tmp_path / "new.jsonl")
    thread.join()
    assert f"interrupted; what was answered is in {log.parent}; " in capsys.readouterr().err
    assert [] == psutil.Process().children(recursive=True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--task", "gsm8k"), "--task 'gsm8k': expected aime24, aime25, aime26; leave --runner out"),
        (("--native",), "has nothing for --native; leave it out"),
        (("--shots", "0", "--filter", "x"), "has nothing for --shots, --filter; leave it out"),
        (("--repeats", "2"), "asks at temperature 0, where repeats are copies; expected 1, or a temperature with"),
        (("--data", "no-such-file"), "no-such-file: is no file; expected JSON lines of {id, problem, expected_answer}"),
        (("--out", "{there}"), "is there, and sgl-eval goes on with no run; name another file"),
        (
            (),
            "no such program in {beside} or on PATH; install it: python3 -m venv sgl-eval && sgl-eval/bin/pip install",
        ),
    ],
)
def test_bad_input(tmp_path: Path, program: Path, capsys: Capture, words: tuple[str, ...], says: str) -> None:
    """What sgl-eval cannot do, and how it is installed where it is not there; nobody is asked."""
    there = tmp_path / "there.jsonl"
    there.write_text("")
    names = {"there": str(there), "beside": str(Path(sys.executable).parent)}
    given = [word.replace("{there}", names["there"]) for word in words]
    assert not program.exists()
    assert 2 == asked("http://127.0.0.1:9", tmp_path / "new.jsonl", *given)
    said = capsys.readouterr().err
    assert (True, 1) == (says.replace("{beside}", names["beside"]) in said, said.count("\n"))
