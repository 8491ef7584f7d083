"""Registrations: read without running anything, and every mistake told with its line."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from ci import register
from ci.register import register_cpu_ci
from ci.registry import Disabled, Registration, RegistrationError, parse, registrations, scan
from harness.usage import UserError

register_cpu_ci(est_time=20, stage="commit")

FILE = Path("tests/test_x.py")
DAY = dt.date(2026, 12, 1)
ISSUE = "https://github.com/o/p/issues/7"


def one(text: str) -> Registration:
    (made,) = registrations(FILE, text)
    return made


def mistake(text: str) -> tuple[int, str]:
    """Line and text of the one problem."""
    (problem,) = parse(FILE, text).problems
    return problem.line, str(problem)


def test_markers_do_nothing() -> None:
    """Calling a marker changes nothing and returns nothing."""
    before = dict(vars(register))
    made = [getattr(register, f"register_{kind}_ci")(est_time=1, stage="s", runner="r") for kind in ("gpu", "cpu")]
    assert [None, None] == made
    assert before == dict(vars(register))


def test_gpu() -> None:
    """All fields of a GPU registration are read, with its line."""
    call = 'register_gpu_ci(est_time=300, stage="commit", runner="r2", nightly=True, gate=True, min_tests=4)'
    expected = Registration(FILE, "gpu", "commit", "r2", 300.0, True, None, 3, gate=True, min_tests=4)
    assert expected == one(f'"""Doc."""\n\n{call}\n')


def test_cpu_default_runner() -> None:
    """A CPU registration runs on ubuntu-latest unless it says otherwise."""
    assert "ubuntu-latest" == one('register_cpu_ci(est_time=1.5, stage="commit")').runner
    assert "arm" == one('register_cpu_ci(est_time=1.5, stage="commit", runner="arm")').runner


def test_several_runners() -> None:
    """A file may be registered on several runners, each with its own time."""
    text = "\n".join(f'register_gpu_ci(est_time={n}0, stage="commit", runner="r{n}")' for n in (1, 2, 3))
    assert [("r1", 10.0), ("r2", 20.0), ("r3", 30.0)] == [
        (made.runner, made.est_time) for made in registrations(FILE, text)
    ]


@pytest.mark.parametrize(
    "value",
    [
        f'{{"reason": "hangs", "issue": "{ISSUE}", "until": "2027-01-31"}}',
        f'"hangs ({ISSUE}), until 2027-01-31"'.replace(", until", ";"),
        f'"2027-01-31: hangs {ISSUE}"',
    ],
)
def test_disabled(value: str) -> None:
    """`disabled` holds reason, issue and expiry, as a mapping or in one string."""
    made = one(f'register_cpu_ci(est_time=1, stage="commit", disabled={value})')
    assert Disabled("hangs", ISSUE, dt.date(2027, 1, 31)) == made.disabled


def test_expired_counts_as_enabled() -> None:
    """A disabled file runs again from its date on."""
    made = one(f'register_cpu_ci(est_time=1, stage="c", disabled="x {ISSUE} 2026-12-02")')
    assert [False, True, True] == [made.is_enabled(DAY + dt.timedelta(days=days)) for days in (0, 1, 2)]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ('register_cpu_ci(est_time=60 * 5, stage="s")', "est_time=60 * 5; expected a literal"),
        ('register_cpu_ci(est_time=T, stage="s")', "est_time=T; expected a literal"),
        ('register_cpu_ci(est_time=1, stage=f"s{n}")', "expected a literal"),
        ('register_cpu_ci(est_time="1", stage="s")', "est_time='1'; expected a number"),
        ('register_cpu_ci(est_time=True, stage="s")', "est_time=True; expected a number"),
        ('register_cpu_ci(est_time=-1, stage="s")', "est_time=-1; expected a number"),
        ('register_cpu_ci(est_time=0, stage="s")', "more than 0 seconds"),
        ('register_cpu_ci(est_time=1e999, stage="s")', "est_time=inf; expected a number"),
        ('register_cpu_ci(est_time=None, stage="s")', "est_time=None; expected a number"),
        ('register_cpu_ci(stage="s")', "without est_time"),
        ("register_cpu_ci(est_time=1)", "without stage"),
        ('register_gpu_ci(est_time=1, stage="s")', "without runner"),
        ('register_gpu_ci(5, stage="s", runner="r")', "keyword arguments only"),
        ('register_gpu_ci(est_time=1, stage="s", runner="a b")', "runner='a b'; expected a name"),
        ('register_gpu_ci(est_time=1, stage="s", runner="r\\n")', "expected a name"),
        ('register_gpu_ci(est_time=1, stage="s", runer="r")', "keyword 'runer' of register_gpu_ci; expected one of"),
        ('register_gpu_ci(est_time=1, stage="s", runer="r")', "did you mean 'runner'?"),
        ('register_gpu_ci(est_time=1, stage="s", runner="r", nightly=1)', "nightly=1; expected True or False"),
        ('register_gpu_ci(est_time=1, stage="s", runner="r", min_tests=0)', "at least 1"),
        ('register_gpu_ci(**{"est_time": 1})', "arguments that are written out"),
        ("register_gpu_ci(*[1])", "arguments that are written out"),
        ('register_cpu_ci(est_time=1, stage="s", disabled="flaky")', "reason, issue and until"),
        (f'register_cpu_ci(est_time=1, stage="s", disabled="x {ISSUE}")', "reason, issue and until"),
        (f'register_cpu_ci(est_time=1, stage="s", disabled="{ISSUE} 2027-01-01")', "reason, issue and until"),
        ('register_cpu_ci(est_time=1, stage="s", disabled={"reason": "x"})', "reason, issue and until"),
        ('register_cpu_ci(est_time=1, stage="s", disabled=True)', "disabled=True; expected"),
        (f'register_cpu_ci(est_time=1, stage="s", disabled="x {ISSUE} 2027-02-30")', "until '2027-02-30' in disabled"),
        (
            'register_cpu_ci(est_time=1, stage="s", disabled={"reason": "x", "issue": "7", "until": "2027-01-01"})',
            "a link",
        ),
        ('register_cuba_ci(est_time=1, suite="s")', "marker register_cuba_ci; expected one of"),
        ('register_cuba_ci(est_time=1, suite="s")', "did you mean 'register_cuda_ci'?"),
    ],
)
def test_mistakes(call: str, says: str) -> None:
    """A call that cannot be used is told with file, line, value, expectation and next step."""
    line, told = mistake(f"import os\n\n{call}\n")
    assert 3 == line
    assert told.startswith("tests/test_x.py:3: ")
    assert says in told


@pytest.mark.parametrize(
    "text",
    [
        'if True:\n    register_cpu_ci(est_time=1, stage="s")',
        'def f():\n    register_cpu_ci(est_time=1, stage="s")',
        'class A:\n    register_cpu_ci(est_time=1, stage="s")',
        'try:\n    register_cpu_ci(est_time=1, stage="s")\nexcept E: pass',
        '(\n    register_cpu_ci)(est_time=1, stage="s").x',
        'mark = register_cpu_ci\nmark(est_time=1, stage="s")',
        'import ci\nci.register.register_cpu_ci(est_time=1, stage="s")',
        'from ci.register import (\n    register_cpu_ci as mark)\nmark(est_time=1, stage="s")',
        'x = 1\ny = register_cpu_ci(est_time=1, stage="s")',
        'register_cpu_ci(est_time=1, stage="s"); 0 if [\nregister_cpu_ci (est_time=1, stage="s")] else 1',
    ],
)
def test_hidden_calls(text: str) -> None:
    """A marker that is called anywhere but at the top level by its plain name is an error, not nothing."""
    _, told = mistake(text)
    assert "by its plain name as a statement of its own at the top level" in told


def test_text_is_no_call() -> None:
    """Markers in comments, strings and definitions are none; in the one file both kinds are told apart."""
    text = '# register_cpu_ci(1)\ns = """\nregister_cpu_ci(est_time=2, stage="s")\n"""\ndef register_cpu_ci(**_): ...\n'
    assert [] == registrations(FILE, text)
    assert [5.0] == [made.est_time for made in registrations(FILE, f'{text}register_cpu_ci(est_time=5, stage="s")')]


def test_twice_on_a_runner() -> None:
    """A second registration on the same runner is an error that names the first."""
    call = 'register_gpu_ci(est_time=1, stage="s", runner="r")\n'
    line, told = mistake(f"\n{call}\n{call}")
    assert 4 == line
    assert "a second time (first in line 2)" in told
    other = call.replace('"s"', '"t"')
    assert "a second time" in mistake(f"{call}{other}")[1]  # in another stage too


def test_all_problems_at_once() -> None:
    """The error of a file has an entry for each of its mistakes."""
    with pytest.raises(RegistrationError) as caught:
        registrations(FILE, "register_cpu_ci()\nregister_gpu_ci()\n")
    assert [1, 2] == [problem.line for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('register_cuda_ci(9, stage="base-b", runner_config="1-gpu-large")', ("cuda", "base-b", "1-gpu-large")),
        ('register_cuda_ci(est_time=9, suite="stage-b-test-1-gpu-small")', ("cuda", "stage-b", "1-gpu-small")),
        ('register_cpu_ci(9, "base-a-test-cpu")', ("cpu", "base-a", "cpu")),
        ('register_cpu_ci(9, "base-a-test-cpu", False, None)', ("cpu", "base-a", "cpu")),
        ('register_cpu_ci(est_time=9, stage="base-a", runner_config="arm64")', ("cpu", "base-a", "arm64")),
        ('register_amd_ci(est_time=9, suite="nightly-amd", in_process_group="g")', ("amd", "nightly-amd", "amd")),
        ('register_npu_ci(est_time=9.0, suite="x-test-1-npu")', ("npu", "x", "1-npu")),
    ],
)  # fmt: skip  # one case a line
def test_sglang(call: str, expected: tuple[str, ...]) -> None:
    """sglang's markers give the same kind of registration; a suite is cut into stage and runner."""
    made = one(call)
    assert expected == (made.backend, made.stage, made.runner)
    assert 9.0 == made.est_time


def test_suite() -> None:
    """The name of a suite is sglang's own, also where it was given as stage and runner."""
    calls = ('stage="a", runner_config="b"', 'suite="a-test-b"', 'suite="nightly-amd"')
    found = [one(f"register_cuda_ci(1, {call})") for call in calls]
    assert ["a-test-b", "a-test-b", "nightly-amd"] == [made.suite for made in found]


def test_sglang_disabled_and_nightly() -> None:
    """sglang's bare reason has no expiry, and its positions are est_time, suite, nightly, disabled."""
    made = one('register_cuda_ci(210, "a-test-b", True, "see #14021")')
    assert (True, Disabled("see #14021")) == (made.nightly, made.disabled)
    assert not made.is_enabled(dt.date(2999, 1, 1))


def test_sglang_stages_of_a_runner() -> None:
    """In sglang a file may be in two stages of one runner, but not twice in one."""
    calls = [f'register_cuda_ci(est_time=1, stage="{s}", runner_config="r")' for s in ("base", "nightly", "base")]
    assert 2 == len(registrations(FILE, "\n".join(calls[:2])))
    assert "a second time" in mistake("\n".join(calls))[1]


@pytest.mark.parametrize(
    "arguments",
    ['est_time=1, stage="s"', "est_time=1", 'est_time=1, stage="s", runner_config="r", suite="u"', "1, disabled='x'"],
)
def test_sglang_shapes(arguments: str) -> None:
    """Anything but a stage with a runner_config, or a suite alone, is an error that names what was set."""
    assert "either stage and runner_config, or suite alone" in mistake(f"register_cuda_ci({arguments})")[1]


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ('if __name__ == "__main__":\n    unittest.main()', True),
        ("if '__main__' == __name__:\n    sys.exit(pytest.main([__file__]))", True),
        ('if __name__ == "__main__":\n    pass', False),
        ('if __name__ != "__main__":\n    f()', False),
        ("", False),
    ],
)
def test_is_script(guard: str, expected: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """A file is a script when its `__main__` guard calls something."""
    assert expected == one(f'register_cpu_ci(est_time=1, stage="s")\n{guard}\n').is_script


@pytest.mark.parametrize("content", ["def (:", "x = 1\n\x00", b"\xff\xfe", "(" * 5000])
def test_no_python(content: str | bytes) -> None:
    """A file that does not parse is a problem, not a crash."""
    (problem,) = parse(FILE, content).problems
    assert problem.value.startswith("no Python")


def test_scan(tmp_path: Path) -> None:
    """A scan finds the files of its folders in order, relative to the root, and imports none of them."""
    for name in ("tests/b/test_b.py", "tests/test_a.py", "other/test_c.py", "tests/.hidden/test_d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('raise SystemExit\nregister_cpu_ci(est_time=1, stage="s")\n')
    (tmp_path / "tests" / "test_none.py").write_text("def test(): ...\n")
    (tmp_path / "tests" / "helper.py").write_text("x = (\n")  # not parsed: it mentions no marker
    found = scan(tmp_path, ["tests"])
    assert ["tests/b/test_b.py", "tests/test_a.py"] == [made.path.as_posix() for made in found.registrations]
    assert (Path("tests/test_none.py"),) == found.unregistered
    assert () == found.problems
    assert 4 == found.files
    assert found.registrations == scan(tmp_path, ["tests/b", "tests", "tests/test_a.py"]).registrations


def test_scan_collects_problems(tmp_path: Path) -> None:
    """One wrong file hides no other; who needs a sound registry asks for it."""
    (tmp_path / "test_a.py").write_text("register_cpu_ci()\n")
    (tmp_path / "test_b.py").write_text('register_cpu_ci(est_time=1, stage="s")\n')
    found = scan(tmp_path)
    assert (1, 1) == (len(found.problems), len(found.registrations))
    with pytest.raises(RegistrationError, match=r"test_a\.py:1: register_cpu_ci without est_time"):
        found.checked()


def test_scan_of_a_missing_folder(tmp_path: Path) -> None:
    """A folder that is not there is an error: an empty registry would look like a clean one."""
    with pytest.raises(UserError, match="no such folder"):
        scan(tmp_path, ["tets"])


def test_this_file() -> None:
    """A test file full of markers in strings has the one registration that it makes."""
    assert ["commit"] == [made.stage for made in registrations(Path(__file__))]
