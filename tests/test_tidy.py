from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci import tidy
from ci.register import register_cpu_ci

register_cpu_ci(est_time=10, stage="commit")

SCRIPT = Path(tidy.__file__)


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def found(root: Path, files: dict[str, str]) -> list[tuple[str, int, str]]:
    return [(finding.path, finding.line, finding.what) for finding in tidy.check(plant(root, files))]


def body(lines: int) -> str:
    """A function of so many lines."""
    return "def f():\n" + "    pass\n" * (lines - 1)


class TestSizes:
    def test_at_the_limit(self, tmp_path: Path) -> None:
        """A file of 400 lines and a function of 70 lines are tidy."""
        assert [] == found(tmp_path, {"harness/types.py": body(70) + "\n" * 330})

    def test_file(self, tmp_path: Path) -> None:
        """A file of 401 lines is found, in any folder, tests too."""
        assert [("tests/test_x.py", 1, "file of 401 lines")] == found(tmp_path, {"tests/test_x.py": "\n" * 401})

    def test_function(self, tmp_path: Path) -> None:
        """A function of 71 lines is found at its line."""
        files = {"ci/plan.py": "\n\n" + body(71)}
        assert [("ci/plan.py", 3, "function f of 71 lines")] == found(tmp_path, files)

    def test_method(self, tmp_path: Path) -> None:
        """Methods and async functions have the same limit."""
        text = "class A:\n    async def m(self):\n" + "        pass\n" * 70
        assert [("ci/plan.py", 2, "function m of 71 lines")] == found(tmp_path, {"ci/plan.py": text})

    def test_no_python(self, tmp_path: Path) -> None:
        """A file that does not parse is a finding, not a crash."""
        assert [("ci/plan.py", 2, "no Python: expected ':'")] == found(tmp_path, {"ci/plan.py": "\ndef f()\n"})


class TestReferenceSize:
    def test_code_lines(self, tmp_path: Path) -> None:
        """Blank lines, comments and docstrings do not count; every line of a long expression and string does."""
        silent = '"""Doc\n\nmore."""\n\n# comment\n'
        text = f'{silent}X = [\n    1,\n    # why\n]\n\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
        sources, _ = tidy.read(plant(tmp_path, {"kvshard_ref/a.py": text}))
        assert {"kvshard_ref/a.py": 6} == tidy.reference_sizes(sources)

    def test_total(self, tmp_path: Path) -> None:
        """2001 code lines in all are found; model.py and server/ do not count."""
        many = {f"kvshard_ref/m{number}.py": "x = 1\n" * 400 for number in range(5)}
        uncounted = {"kvshard_ref/model.py": "x = 1\n" * 400, "kvshard_ref/server/http.py": "x = 1\n" * 400}
        assert [] == found(tmp_path, many | uncounted)
        assert [("kvshard_ref/__init__.py", 1, "the reference has 2001 code lines")] == found(
            tmp_path, {"kvshard_ref/extra.py": "x = 1\n"}
        )


class TestFolders:
    @pytest.mark.parametrize(
        ("path", "text"),
        [
            (
                "kvshard_ref/pool.py",
                "import torch\nimport numpy as np\nimport heapq\nfrom kvshard_ref.placement import P\n",
            ),
            ("kvshard_ref/server/http.py", "import fastapi\n"),
            (
                "suites/story.py",
                "from harness import types\nfrom harness.case import case\nfrom suites import oracle\n",
            ),
            ("suites/story.py", "import hypothesis\n"),
            ("harness/adapters/ref.py", "from kvshard_ref.worker import PrefillWorker\n"),
            ("harness/capacity_cli.py", "from kvshard_ref import cache\n"),
            ("ci/plan.py", "import harness.types\n"),
            ("ci/train_model.py", "from kvshard_ref.model import TinyModel\n"),
            ("fixtures/faults/engine/waits.py", "from harness.fault import Fault\n"),
            ("kvshard_ref/model.py", "from safetensors import safe_open\n"),
            ("tests/test_x.py", "import kvshard_ref.pool\nfrom harness.cli import main\nfrom suites import oracle\n"),
        ],
    )
    def test_allowed(self, tmp_path: Path, path: str, text: str) -> None:
        """Imports in the one direction are tidy."""
        assert [] == found(tmp_path, {path: text})

    @pytest.mark.parametrize(
        ("path", "text", "module"),
        [
            ("kvshard_ref/pool.py", "import harness.types\n", "harness.types"),
            ("kvshard_ref/pool.py", "from suites import oracle\n", "suites"),
            ("kvshard_ref/pool.py", "import msgspec\n", "msgspec"),
            ("kvshard_ref/pool.py", "import fastapi\n", "fastapi"),
            ("harness/types.py", "from kvshard_ref.placement import P\n", "kvshard_ref.placement"),
            ("harness/types.py", "import suites.oracle\n", "suites.oracle"),
            ("harness/types.py", "import tests.test_x\n", "tests.test_x"),
            ("suites/story.py", "from kvshard_ref import pool\n", "kvshard_ref"),
            ("suites/story.py", "from harness.adapters.ref import RefEngine\n", "harness.adapters.ref"),
            ("suites/story.py", "import harness.cli\n", "harness.cli"),
            ("ci/plan.py", "from harness.cli import main\n", "harness.cli"),
            ("fixtures/load.py", "import harness.types\n", "harness.types"),
            ("fixtures/faults/engine/waits.py", "import kvshard_ref.pool\n", "kvshard_ref.pool"),
            ("ci/plan.py", "import kvshard_ref.model\n", "kvshard_ref.model"),
            ("kvshard_ref/pool.py", "import safetensors\n", "safetensors"),
        ],
    )
    def test_forbidden(self, tmp_path: Path, path: str, text: str, module: str) -> None:
        """Imports against the direction are found."""
        importer = path.removesuffix(".py").replace("/", ".")
        assert [(path, 1, f"{importer} imports {module}")] == found(tmp_path, {path: text})

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("def f():\n    import harness.types\n", 2),
            ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import harness.types\n", 3),
            ("try:\n    import harness.types\nexcept ImportError:\n    pass\n", 2),
        ],
    )
    def test_hidden(self, tmp_path: Path, text: str, line: int) -> None:
        """An import in a function, under TYPE_CHECKING or in a try counts too."""
        assert [("kvshard_ref/pool.py", line, "kvshard_ref.pool imports harness.types")] == found(
            tmp_path, {"kvshard_ref/pool.py": text}
        )

    def test_module_as_name(self, tmp_path: Path) -> None:
        """`from harness import adapters` is the import of the module, where there is one."""
        files = {"suites/story.py": "from harness import adapters\n", "harness/adapters/__init__.py": ""}
        assert [("suites/story.py", 1, "suites.story imports harness.adapters")] == found(tmp_path, files)

    def test_relative(self, tmp_path: Path) -> None:
        """Relative imports are resolved, from modules and from packages."""
        files = {
            "harness/__init__.py": "",
            "harness/types.py": "from .cli import main\nfrom . import render\n",
            "harness/render.py": "",
            "harness/cli.py": "",
            "harness/adapters/__init__.py": "from ..cli import main\n",
        }
        assert [
            ("harness/adapters/__init__.py", 1, "harness.adapters imports harness.cli"),
            ("harness/types.py", 1, "harness.types imports harness.cli"),
            ("harness/types.py", 2, "harness.types imports harness.render (layer 0 imports layer 5)"),
        ] == found(tmp_path, files)


class TestLayers:
    def test_down(self, tmp_path: Path) -> None:
        """A module may import any lower layer, and a package its own modules."""
        files = {
            "harness/case.py": "import harness.types\n",
            "harness/runner.py": "from harness.types import Op\nfrom harness.plugin import P\n",
            "harness/adapters/ref.py": "from harness.adapters.ref_rank import R\n",
        }
        assert [] == found(tmp_path, files)

    @pytest.mark.parametrize(
        ("importer", "module", "layers"),
        [
            ("types", "adapter", "layer 0 imports layer 1"),
            ("adapter", "connect", "layer 1 imports layer 4"),
            ("case", "record", "layer 3 imports layer 3"),
            ("plugin", "runner", "layer 8 imports layer 9"),
            ("adapters.ref", "connect", "layer 3 imports layer 4"),
        ],
    )
    def test_up_or_across(self, tmp_path: Path, importer: str, module: str, layers: str) -> None:
        """An import of the same or a higher layer is found."""
        path = f"harness/{importer.replace('.', '/')}.py"
        expected = f"harness.{importer} imports harness.{module} ({layers})"
        assert [(path, 1, expected)] == found(tmp_path, {path: f"import harness.{module}\n"})

    def test_no_layer(self, tmp_path: Path) -> None:
        """A module that the table does not know has to be added to it."""
        assert [("harness/newcomer.py", 1, "harness.newcomer is in no layer")] == found(
            tmp_path, {"harness/newcomer.py": "import harness.cli_helpers\n"}
        )

    def test_once(self) -> None:
        """The table names every module once."""
        names = [name for names in tidy.HARNESS_LAYERS for name in names]
        assert sorted(set(names)) == sorted(names)

    def test_no_stale_layer(self) -> None:
        """The table names no module that is gone."""
        harness = SCRIPT.parent.parent / "harness"
        known = {path.stem for path in harness.iterdir()}
        assert set() == {name for names in tidy.HARNESS_LAYERS for name in names} - known


class TestInit:
    def test_reexports(self, tmp_path: Path) -> None:
        """Docstring, imports and __all__ are tidy, and so is an empty __init__."""
        text = '"""Doc."""\n\nfrom __future__ import annotations\n\nfrom harness.types import Op\n\n__all__ = ["Op"]\n'
        assert [] == found(tmp_path, {"harness/adapters/__init__.py": text, "harness/__init__.py": ""})

    @pytest.mark.parametrize(
        "text", ["VERSION = '1'\n", "def f():\n    pass\n", "if True:\n    import os\n", "print(1)\n"]
    )
    def test_code(self, tmp_path: Path, text: str) -> None:
        """Anything else is found."""
        assert [("suites/__init__.py", 1, "code in suites/__init__.py")] == found(
            tmp_path, {"suites/__init__.py": text}
        )


class TestEngineNames:
    def test_bug_ids(self, tmp_path: Path) -> None:
        """A docstring may cite public bugs by id; other folders may name engines."""
        files = {
            "suites/a.py": '"""A page is freed twice (sglang#12345, vllm#7, sglang-jax#1386)."""\n',
            "harness/adapters/b.py": "NAME = 'vllm'\n",
        }
        assert [] == found(tmp_path, files)

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("if engine == 'sglang':\n    pass\n", "the engine name 'sglang'"),
            ("def skip_on_VLLM():\n    pass\n", "the engine name 'VLLM'"),
            ("# trtllm does this too\n", "the engine name 'trtllm'"),
            ("ENGINE = 'ref'\n", "the engine address 'ref'"),
            ("ENGINE = 'ref?shards=4'\n", "the engine address 'ref?shards=4'"),
        ],
    )
    def test_names(self, tmp_path: Path, text: str, what: str) -> None:
        """A name in code, in a string or in a comment is found, and so is the address of the reference."""
        assert [("suites/a.py", 1, what)] == found(tmp_path, {"suites/a.py": text})

    def test_words_with_ref(self, tmp_path: Path) -> None:
        """Words that only begin with the reference's address are tidy."""
        assert [] == found(tmp_path, {"suites/a.py": "X = ('refused', 'prefix', 'a ref')\n"})


class TestProcessState:
    def test_constants(self, tmp_path: Path) -> None:
        """UPPER_CASE tables, immutable values, dunders, pytest's names and local containers are tidy."""
        text = (
            "__all__ = ['f']\npytestmark = []\nTABLE = {'a': 1}\n_NAMES = ['b']\nnames = ('a', 'b')\nlimit = 3\n"
            "def f():\n    seen = []\n    seen.append(TABLE['a'])\n    return seen\n"
        )
        assert [] == found(tmp_path, {"harness/types.py": text})

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("cache = {}\n", "module-level container cache"),
            ("seen: set[int] = set()\n", "module-level container seen"),
            ("_free, limit = [], 3\n", "module-level container _free"),
            ("ports = itertools.count(3000)\n", "module-level container ports"),
            ("by_name = collections.defaultdict(list)\n", "module-level container by_name"),
            ("squares = [x * x for x in range(3)]\n", "module-level container squares"),
            ("TABLE = {}\nTABLE['a'] = 1\n", "TABLE is changed"),
            ("TABLE = {}\ndef f():\n    TABLE.update(a=1)\n", "TABLE is changed"),
            ("def f():\n    global count\n    count = 1\n", "global count"),
            ("def f():\n    os.environ['A'] = '1'\n", "os.environ is changed"),
            ("def f():\n    os.environ.pop('A')\n", "os.environ is changed"),
        ],
    )
    def test_state(self, tmp_path: Path, text: str, what: str) -> None:
        """Containers of a lower-case name, changed constants, globals and writes to the environment are found."""
        assert [what] == [finding[2] for finding in found(tmp_path, {"harness/types.py": text})]


class TestCommand:
    def test_good_tree(self, tmp_path: Path) -> None:
        """A tidy tree exits 0 and prints the sizes of the reference."""
        plant(tmp_path, {"kvshard_ref/a.py": "x = 1\n"})
        done = subprocess.run([sys.executable, SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
        expected = "     1 kvshard_ref/a.py\n     1 code lines of the reference of 2000, without docstrings\ntidy\n"
        assert (0, expected) == (done.returncode, done.stdout)

    def test_bad_tree(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Findings exit 1, each with place, what is wrong, the limit and the next step."""
        plant(tmp_path, {"harness/types.py": "cache = {}\n"})
        assert 1 == tidy.main([str(tmp_path)])
        expected = (
            "harness/types.py:1: module-level container cache; limit: no state that all of a process shares; "
            "next step: make it an UPPER_CASE constant that never changes, or a field of an object"
        )
        assert [expected, "1 findings"] == capsys.readouterr().out.splitlines()[1:]


class TestIgnores:
    @pytest.mark.parametrize("comment", ["# noqa: S101", "# type: ignore[misc]", "# type: ignore[misc]  # noqa: E731"])
    def test_without_a_reason(self, tmp_path: Path, comment: str) -> None:
        """An ignore that does not say why is found at its line."""
        files = {"tests/test_x.py": f"\nX = 1  {comment}\n"}
        assert [("tests/test_x.py", 2, f"an ignore without a reason: {comment}")] == found(tmp_path, files)

    @pytest.mark.parametrize(
        "comment", ["# noqa: S101 - why", "# type: ignore[misc]  # why", "# why", '"# noqa: S101"']
    )
    def test_with_a_reason(self, tmp_path: Path, comment: str) -> None:
        """One that does is tidy, and so is a text that only looks like one."""
        assert [] == found(
            tmp_path, {"tests/test_x.py": f"X = 1  {comment}\n" if comment[0] == "#" else f"X = {comment}\n"}
        )
