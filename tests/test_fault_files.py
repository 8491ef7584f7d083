"""Faults are found in a file, a folder or a package; what is no fault there is told, and so is one that is stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.connect import AddressError
from harness.fault import Edit, Fault, FaultError
from harness.fault_files import LIBRARY, library
from harness.suite import SuiteError
from harness.usage import UserError

register_cpu_ci(est_time=10, stage="commit")

BEGIN = """
from harness.fault import Edit, Fault, Variant

TARGET = "tests.fault_targets:total"

def fault(name, old="return result"):
    return Fault(name, "It is wrong.", "kind", "systematic", ("I01",), (Edit(TARGET, old, "return 0"),))

def variant(name, old="return result"):
    return Variant(name, "It is right.", (Edit(TARGET, old, "return (result + 1) - 1"),))

"""


def file(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(BEGIN + text + "\n")
    return str(path)


def test_a_file(tmp_path: Path) -> None:
    """FAULTS and VARIANTS of a module, by id, in the order they are written; nothing else in it counts."""
    path = file(
        tmp_path / "mine.py", 'FAULTS = (fault("b"), fault("a"))\nVARIANTS = [variant("c")]\nOTHER = fault("d")'
    )

    found = library(path)

    assert (["b", "a"], ["c"]) == ([*found.faults], [*found.variants])
    assert (Edit("tests.fault_targets:total", "return result", "return 0"),) == found.faults["a"].changes
    assert "It is right." == found.variants["c"].does


def test_a_folder(tmp_path: Path) -> None:
    """All files below it in order, but those that begin with an underscore; a file may have only one of the two."""
    file(tmp_path / "z.py", 'FAULTS = (fault("z"),)')
    file(tmp_path / "a.py", 'VARIANTS = (variant("a"),)')
    file(tmp_path / "deep" / "b.py", 'FAULTS = (fault("b"),)')
    file(tmp_path / "_private.py", "raise RuntimeError")
    file(tmp_path / "beside.py", "")

    found = library(str(tmp_path))

    assert (["b", "z"], ["a"]) == ([*found.faults], [*found.variants])


def test_a_package_and_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of a package and of those in it, or one module, by their name."""
    for package in ("faults_of_mine", "faults_of_mine/inner"):
        file(tmp_path / package / "__init__.py", "")
    file(tmp_path / "faults_of_mine" / "b.py", 'FAULTS = (fault("b"),)')
    file(tmp_path / "faults_of_mine" / "inner" / "c.py", 'FAULTS = (fault("c"),)')
    monkeypatch.syspath_prepend(tmp_path)

    assert ["b", "c"] == [*library("faults_of_mine").faults]
    assert ["c"] == [*library("faults_of_mine.inner.c").faults]


def test_the_library_can_be_planted() -> None:
    """Every fault and variant of the project is planted for a moment; its unit tests and its level exist."""
    found = library(LIBRARY)

    assert len(found.faults) > 100
    assert len(found.variants) > 20
    root = Path(__file__).parent.parent
    tests = {test for fault in found.faults.values() for test in fault.tests}
    assert [] == [test for test in tests if not (root / test.partition("::")[0]).is_file()]
    assert [] == [fault.id for fault in found.faults.values() if not (fault.breaks or fault.tests)]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('FAULTS = (fault("a"), fault("a"))', "fault id 'a' of "),
        ('FAULTS = (fault("a"),)\nVARIANTS = (variant("a"),)', "is used before; ids are unique"),
        ('FAULTS = fault("a")', "is a Fault; expected a tuple of Fault"),
        ('FAULTS = {"a": fault("a")}', "is a dict; expected a tuple of Fault"),
        ("FAULTS = None", "is a NoneType; expected a tuple of Fault"),
        ('FAULTS = (variant("a"),)', "holds a Variant; expected a tuple of Fault"),
        ('VARIANTS = (variant("a"), "b")', "holds a str; expected a tuple of Variant"),
        ("", "no FAULTS and no VARIANTS in any module there"),
        ("FAULTS = ()", "no FAULTS and no VARIANTS in any module there"),
        ('FAULTS = (fault("a"), fault("b", "gone"))', "fault 'b': tests.fault_targets:total: found 0 times"),
        ('VARIANTS = (variant("a", "gone"),)', "fault 'a': tests.fault_targets:total: found 0 times"),
    ],
)
def test_what_is_no_library_is_told(tmp_path: Path, text: str, part: str) -> None:
    """An id that is used twice, something else than faults, nothing at all, a fault that is stale: each is named."""
    with pytest.raises(FaultError, match=re.escape(part)) as caught:
        library(file(tmp_path / "mine.py", text))
    assert "mine.py" in str(caught.value) or "fault '" in str(caught.value)


@pytest.mark.parametrize(
    ("where", "error", "part"),
    [
        ("none.py", AddressError, "none.py: there is no Python file none.py"),
        ("no/folder", AddressError, "there is no Python file no/folder"),
        ("suites.selfchekc", SuiteError, "suites.selfchekc cannot be imported: ModuleNotFoundError"),
    ],
)
def test_where_nothing_is(where: str, error: type[UserError], part: str) -> None:
    """A file, folder or package that is not there is a user's mistake."""
    with pytest.raises(error, match=re.escape(part)):
        library(where)


def test_a_file_that_breaks_is_told(tmp_path: Path) -> None:
    """A file that raises is told with the place."""
    with pytest.raises(AddressError, match=r"mine\.py cannot be imported: ZeroDivisionError: .* at .*mine\.py:\d+"):
        library(file(tmp_path / "mine.py", "FAULTS = (1 / 0,)"))


def test_unchecked_ones_are_not_planted(tmp_path: Path) -> None:
    """Who knows that all was checked, gets even what is stale; ids and types are still looked at."""
    path = file(tmp_path / "mine.py", 'FAULTS = (fault("a", "gone"),)')

    assert isinstance(library(path, checked=False).faults["a"], Fault)
    with pytest.raises(FaultError, match="found 0 times"):
        library(path)
    with pytest.raises(FaultError, match="ids are unique"):
        library(file(tmp_path / "twice.py", 'FAULTS = (fault("a"), fault("a"))'), checked=False)
