"""The tree of a pull request is data: nothing in it is imported, run or followed."""

from __future__ import annotations

import datetime as dt
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ci.comment_parse import Bad, Command
from ci.comment_plan import Planner, changed_tests
from ci.comment_tree import FILE_BYTES_MAX, expand, node_id, resolve, tree_in, tree_of
from ci.register import register_cpu_ci
from tests.comment_rig import CASES, FOLDERS, RUNNERS, cpu, sample_table

register_cpu_ci(est_time=10, stage="commit")

EVIL = 'import os\nos.mkdir("{place}")\nraise SystemExit(1)\n'


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def planned(root: Path, *specs: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Command lines and refusals."""
    planner = Planner(tree_in(root, FOLDERS), RUNNERS, sample_table(), dt.date(2026, 6, 1))
    plan = planner.plan([Command("rerun-test", specs)])
    lines = [command[-1] for job in plan.dispatches for command in job.commands]
    return lines, [(refusal.what, refusal.why) for refusal in plan.refusals]


class TestDisk:
    def test_nothing_runs(self, tmp_path: Path) -> None:
        """A test file that does something when it is imported is planned, and does nothing."""
        place = tmp_path / "was-run"
        root = made(
            tmp_path / "tree", {"suites/test_x.py": cpu() + EVIL.format(place=place), "suites/conftest.py": EVIL}
        )
        assert (["suites/test_x.py"], []) == planned(root, "test_x.py")
        assert not place.exists()

    def test_links(self, tmp_path: Path) -> None:
        """Symbolic links to files, to folders, and test folders that are links, are not followed, and that is said."""
        outside = made(tmp_path / "outside", {"test_secret.py": cpu(), "sub/test_secret2.py": cpu()})
        root = made(tmp_path / "tree", {"suites/test_x.py": cpu()})
        (root / "suites" / "test_link.py").symlink_to(outside / "test_secret.py")
        (root / "suites" / "dir").symlink_to(outside / "sub")
        (root / "tests").symlink_to(outside)
        assert {"suites/test_x.py"} == tree_in(root, FOLDERS).paths
        lines, refused = planned(
            root, "suites/test_link.py", "suites/dir/test_secret2.py", "tests/test_secret.py", "test_secret.py"
        )
        assert [] == lines
        linked = "it is, or is in, a symbolic link"
        assert [linked, linked, linked] == [why for _, why in refused[:3]]

    def test_no_plain_file(self, tmp_path: Path) -> None:
        """A pipe in the place of a file is no file; nothing waits for it."""
        root = made(tmp_path, {"suites/test_x.py": cpu()})
        os.mkfifo(root / "suites" / "test_pipe.py")
        lines, refused = planned(root, "test_pipe.py", "test_x.py")
        assert ["suites/test_x.py"] == lines
        assert ["test_pipe.py"] == [what for what, _ in refused]

    def test_a_link_that_appears_later(self, tmp_path: Path) -> None:
        """A file that has become a link after the folder was listed is not read."""
        root = made(tmp_path, {"suites/test_x.py": cpu(), "outside.py": cpu()})
        tree = tree_in(root, FOLDERS)
        (root / "suites" / "test_x.py").unlink()
        (root / "suites" / "test_x.py").symlink_to(root / "outside.py")
        with pytest.raises(Bad, match="cannot be read"):
            tree.read_text("suites/test_x.py")

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"x" * (FILE_BYTES_MAX + 1), f"it has {FILE_BYTES_MAX + 1} bytes"),
            (b"\xff\xfe", "it cannot be read (UnicodeDecodeError)"),
            (b"x = 1\x00", "it is no Python that can be parsed"),
            (b"(" * 1000, "it is no Python that can be parsed"),
            (b"x" + b".y" * 100_000, None),
            (b"-" * 100_000 + b"1", None),
            (b"register_cpu_ci(stage='x', est_time=" + b"-" * 900 + b"1)\n", None),
            (b"register_cpu_ci(" + b"[" * 150 + b"]" * 150 + b")\n", None),
        ],
        ids=["large", "no UTF-8", "null", "parentheses", "attributes", "signs", "deep", "nested"],
    )
    def test_hostile_files(self, tmp_path: Path, content: bytes, why: str | None) -> None:
        """A file that is made to break a parser is refused within seconds."""
        root = made(tmp_path, {"suites/test_x.py": ""})
        (root / "suites" / "test_x.py").write_bytes(content)
        start = time.process_time()
        lines, refused = planned(root, "test_x.py")
        assert time.process_time() - start < 5
        assert ([], 1) == (lines, len(refused))
        assert why is None or why == refused[0][1]

    def test_no_folder(self, tmp_path: Path) -> None:
        """A tree without test folders has no tests."""
        assert ([], [("test_x.py", "there is no such file in the pull request")]) == planned(tmp_path, "test_x.py")


class TestResolve:
    TREE = tree_of(
        {"suites/a/test_x.py": CASES, "suites/a/b/test_y.py": "", "tests/a/test_x.py": "", "suites/a/helper.py": ""},
        FOLDERS,
    )

    def test_candidates(self) -> None:
        """An ambiguous name is answered with its candidates, a wrong one with the nearest."""
        with pytest.raises(Bad) as bad:
            resolve("a/test_x.py", self.TREE)
        assert "name one of `suites/a/test_x.py`, `tests/a/test_x.py`" == bad.value.advice
        with pytest.raises(Bad) as bad:
            resolve("suites/a/test_z.py", self.TREE)
        assert bad.value.advice.startswith("did you mean ")

    def test_stars(self) -> None:
        """`*` stays within a part of a path; a folder that matches stands for all below it."""
        assert ["suites/a/test_x.py"] == expand("suites/a/*.py", self.TREE)
        assert ["suites/a/b/test_y.py"] == expand("suites/*/b", self.TREE)
        assert ["suites/a/b/test_y.py", "suites/a/test_x.py"] == expand("suites/*", self.TREE)

    def test_slow_globs(self) -> None:
        """A glob of many stars takes no time, whatever the names."""
        tree = tree_of({f"suites/test_{'a' * 150}{number}.py": "" for number in range(2000)}, FOLDERS)
        start = time.process_time()
        with pytest.raises(Bad):
            expand("*a" * 90 + "b", tree)
        assert time.process_time() - start < 5

    @pytest.mark.parametrize(
        ("tests", "expected"),
        [
            ("TestCache.test_hit", "TestCache::test_hit"),
            ("TestCache", "TestCache"),
            ("test_alone", "test_alone"),
            ("TestMore.test_x", "TestMore::test_x"),
        ],
    )
    def test_nodes(self, tests: str, expected: str) -> None:
        """What is named behind `::` must exist; a method may come from a base class."""
        assert expected == node_id(CASES, tests)

    @pytest.mark.parametrize("tests", ["TestCash", "TestCache.test_no", "test_alone.test_x"])
    def test_no_nodes(self, tests: str) -> None:
        """What does not exist is refused with what there is."""
        with pytest.raises(Bad, match="there is no") as bad:
            node_id(CASES, tests)
        assert bad.value.advice.startswith("it has ")


class TestPlan:
    def test_json(self) -> None:
        """The plan as JSON holds for each job runner, labels, files, lists of arguments, estimate and limit."""
        tree = tree_of({"suites/test_x.py": cpu(90)}, FOLDERS)
        plan = Planner(tree, RUNNERS, sample_table(), dt.date(2026, 6, 1)).plan([Command("rerun-test", ("test_x.py",))])
        job = {
            "runner": "ubuntu-latest",
            "labels": ["ubuntu-latest"],
            "files": ["suites/test_x.py"],
            "commands": [["python3", "-m", "pytest", "-x", "suites/test_x.py"]],
            "minutes": 1.5,
            "limit_minutes": 20.0,
        }
        assert {"dispatches": [job], "refusals": [], "notes": []} == plan.as_json()

    def test_jobs(self) -> None:
        """Jobs hold at most what their runner allows; what no number of jobs can hold is refused."""
        tree = tree_of({f"suites/test_{at}.py": cpu(500) for at in range(12)}, FOLDERS)
        planner = Planner(tree, RUNNERS, sample_table(), dt.date(2026, 6, 1))
        some = planner.plan([Command("rerun-test", ("test_[0-7].py",))])
        assert [2, 2, 2, 2] == [len(job.tests) for job in some.dispatches]
        all_of_them = planner.plan([Command("rerun-test", ("test_*.py",))])
        assert [] == all_of_them.dispatches
        assert ["12 tests of 100 min in all are more than 4 jobs can hold"] == [bad.why for bad in all_of_them.refusals]

    def test_disabled_until(self) -> None:
        """A file whose `disabled` has expired runs."""
        until = ', disabled={"reason": "r", "issue": "https://example.com/1", "until": "2026-05-31"}'
        tree = tree_of({"suites/test_x.py": cpu(60, until)}, FOLDERS)
        plan = Planner(tree, RUNNERS, sample_table(), dt.date(2026, 6, 1)).plan([Command("rerun-test", ("test_x.py",))])
        assert 1 == len(plan.dispatches)

    def test_changed(self) -> None:
        """Removed files and plain renames are not changed files; a rename with an edit is."""
        files: list[dict[str, Any]] = [
            {"filename": "a", "status": "added"},
            {"filename": "b", "status": "removed", "changes": 3},
            {"filename": "c", "status": "renamed", "changes": 0},
            {"filename": "d", "status": "renamed", "changes": 1},
        ]
        assert ["a", "d"] == changed_tests(files)
