"""Cases are found by package, module, file and folder, without pytest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.suite import SuiteError, all_cases, case_by_id, modules_of, root_of

register_cpu_ci(est_time=10, stage="commit")

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def path_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_cases_of_a_file_are_found_in_order() -> None:
    """A file is a suite; its cases come in the order they are written."""
    names = [made.id for made in all_cases((str(HERE / "sample_cases.py"),))]

    assert names == [
        "sample.reads_what_was_written",
        "sample.free_pages_are_counted",
        "sample.never_met",
        "sample.needs_locate",
    ]


def test_cases_of_a_package_are_found() -> None:
    """The suites of this project are found by the package's name, and by one module's."""
    cases = all_cases()

    assert {made.module.rpartition(".")[0] for made in cases} == {"suites.invariants"}
    assert all_cases((cases[0].module,))[0] is cases[0]


def test_a_folder_is_a_suite(tmp_path: Path) -> None:
    """The `test_*.py` files of a folder, and no others, imported from the first folder that is no package."""
    package = tmp_path / "folder_of_cases"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "test_none.py").write_text("")
    (package / "other.py").write_text("raise RuntimeError")

    assert [module.__name__ for module in modules_of(f"{package}/")] == ["folder_of_cases.test_none"]
    assert root_of(package / "test_none.py") == tmp_path


@pytest.mark.parametrize(
    ("suite", "part"),
    [
        ("suites.invariant", "'suites.invariant' is no module and no file or folder"),
        ("suites.invariant", "did you mean 'suites.invariants'?"),
        ("no/such.py", "'no/such.py' is no module and no file or folder"),
    ],
)
def test_a_suite_that_is_not_there_is_told(suite: str, part: str) -> None:
    """The message shows the name, where it was looked for and the nearest one."""
    with pytest.raises(SuiteError) as caught:
        all_cases((suite,))

    assert part in str(caught.value)


def test_a_suite_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    """An error while a suite is imported is one line with its place."""
    (tmp_path / "test_broken_suite.py").write_text("\nimport no_such_module\n")

    with pytest.raises(SuiteError) as caught:
        all_cases((str(tmp_path / "test_broken_suite.py"),))

    assert "test_broken_suite cannot be imported: ModuleNotFoundError" in str(caught.value)
    assert str(caught.value).endswith("test_broken_suite.py:2")


def test_one_id_is_one_case(tmp_path: Path) -> None:
    """Two cases with one id are an error that names both modules."""
    text = (HERE / "sample_cases.py").read_text()
    for name in ("test_twice_a", "test_twice_b"):
        (tmp_path / f"{name}.py").write_text(text)

    with pytest.raises(SuiteError, match="is used in test_twice_a and in test_twice_b"):
        all_cases((str(tmp_path),))


def test_the_nearest_case_is_told() -> None:
    """An id that is nearly right leads to the right one."""
    cases = all_cases((str(HERE / "sample_cases.py"),))

    assert case_by_id("sample.never_met", cases).claim == "What never happens is not proven."
    with pytest.raises(SuiteError, match=r"no case is called 'sample.nevermet'; did you mean 'sample.never_met'\?"):
        case_by_id("sample.nevermet", cases)
