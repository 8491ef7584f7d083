"""A file without its middle says the same as the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from ci.registry import parse, scan
from ci.skim import skimmed

register_cpu_ci(est_time=20, stage="commit")

ROOT = Path(__file__).parent.parent
MARK = 'register_cpu_ci(est_time=1, stage="s")'
GUARD = 'if __name__ == "__main__":\n    unittest.main()'
PIECES = (
    MARK,
    MARK.replace("cpu", "gpu").replace(")", ', runner="r")'),
    GUARD,
    GUARD.replace("unittest.main()", "pass"),
    "if '__main__' == __name__:\n    f()",
    "if (__name__\n    == '__main__'):\n    f()",
    "if x:\n    pass",
    f"else:\n    {MARK}",
    "try:\n    pass",
    "except E:\n    pass",
    '"""Doc',
    "It isn't",
    '"""',
    "'''",
    "x = (",
    ")",
    "y = 1 + \\",
    "z = 'a # b'",
    'w = "it\'s"',
    "# it's __main__",
    "def test_a():\n    assert '__main__'",
    "",
)
STRINGS = f'TEXT = """\n{GUARD}\n"""\n'


def check(text: str) -> None:
    """What is parsed first says what the whole says, or is no Python, and then the whole is asked."""
    whole, less = parse(Path("t.py"), text.encode()), parse(Path("t.py"), skimmed(text.encode()))
    if not any(problem.value.startswith("no Python") for problem in (*whole.problems, *less.problems)):
        assert whole == less


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=9))
def test_any_pieces(pieces: list[str]) -> None:
    """Strings, brackets and continued lines around registrations and guards, in any order, change nothing."""
    check("\n".join((*pieces, "")))


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/test_*.py")), ids=lambda path: path.name)
def test_this_project(path: Path) -> None:
    """The same for the test files of this project, many of which hold files in strings."""
    check(path.read_text())


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"import a\n{MARK}\ndef test_a():\n    ...\n\n{GUARD}\n", f"import a\n{MARK}\n\n\n\n{GUARD}\n"),
        (f"{MARK}\ndef test_a(): ...\n", f"{MARK}\n"),
        (f"{MARK}\n{STRINGS}", None),
        (f"{MARK}\n{STRINGS}{GUARD}\n", None),
        (f"{MARK}\nx = 'a' \\\n{GUARD}\n", None),
        (f"{MARK}\nx = 1\nif (\n    __name__ == '__main__'\n):\n    f()\n", None),
        (MARK, None),
    ],
)
def test_what_is_left(text: str, left: str | None) -> None:
    """The middle is left out where it is whole statements without doubt; else (None) nothing is."""
    assert (text if left is None else left) == skimmed(text.encode()).decode()


def test_mistakes(tmp_path: Path) -> None:
    """A mistake in the middle is found by who asks for whole files; one in a registration by all."""
    (tmp_path / "test_a.py").write_text(f"{MARK}\ndef test_a(:\n{GUARD}\n")
    assert [True, True] == [made.is_script for made in scan(tmp_path).registrations for _ in (1, 2)]
    (problem,) = scan(tmp_path, whole=True).problems
    assert problem.value.startswith("no Python")
    (tmp_path / "test_a.py").write_text("register_cpu_ci()\ndef test_a(): ...\n")
    assert [scan(tmp_path).problems] == [scan(tmp_path, whole=True).problems]
