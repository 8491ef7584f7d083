"""Engines are found by address, and a wrong address is one line that says what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ci.register import register_cpu_ci
from harness.connect import AddressError, check_engine, connect, engines, manifest_of, parse
from harness.types import Manifest
from tests.miniature import MANIFEST, Miniature

register_cpu_ci(est_time=10, stage="commit")

HERE = Path(__file__).parent
FILE = f"py:{HERE / 'miniature.py'}"


@pytest.fixture(autouse=True)
def path_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("ref", ("ref", None, {})),
        ("ref?shards=4&layout=replicated", ("ref", None, {"shards": "4", "layout": "replicated"})),
        ("ref?name=", ("ref", None, {"name": ""})),
        ("py:a.b:c", ("a.b", "c", {})),
        ("py:./a.py:make.it?x=1", ("./a.py", "make.it", {"x": "1"})),
    ],
)
def test_an_address_is_taken_apart(address: str, expected: tuple[str, str | None, dict[str, str]]) -> None:
    """Name or module, factory and options are told apart without an import."""
    assert parse(address) == expected


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("", "'' is no address; expected a name"),
        ("ftp://host:1", "'ftp://host:1' is no address"),
        ("py:module", "'py:module' names no factory"),
        ("py:module:", "names no factory"),
        ("ref?shards", "options 'shards'; expected key=value"),
        ("ref?a=1&a=2", "option a is given twice"),
    ],
)
def test_wrong_grammar_is_told(address: str, part: str) -> None:
    """The message shows the address and the form that was expected."""
    with pytest.raises(AddressError) as caught:
        parse(address)

    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("reff", "no engine is named 'reff'; did you mean 'ref'? There is: ref"),
        ("py:no.such.module:x", "no.such.module cannot be imported: ModuleNotFoundError: No module named 'no'"),
        (f"{FILE}:corect", "miniature.py has no 'corect'; did you mean 'correct'?"),
        (f"{FILE}:Miniature.nothing", "miniature.py.Miniature has no 'nothing'"),
        ("py:missing/file.py:x", "there is no Python file missing/file.py"),
        (f"{FILE}:MANIFEST", "is a Manifest; expected a factory or an engine"),
        (f"{FILE}:MANIFEST.name", "is a str; expected a factory or an engine"),
        (f"{FILE}:dict", "has no 'dict'"),
        (f"{FILE}:Config", "gave a Config without describe and open"),
        (f"{FILE}:instance?name=x", "takes no options, because it is an engine"),
        (f"{FILE}:correct?nam=x", "the factory raised ValueError: unknown option ['nam']"),
        (f"{FILE}:wrong?name=x", "got an unexpected keyword argument 'name'"),
    ],
)
def test_what_is_not_there_is_told(address: str, part: str) -> None:
    """Names, modules, attributes and factories that are no use are told on one line, with the nearest name."""
    with pytest.raises(AddressError) as caught:
        connect(address)

    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_place_of_an_import_error_is_told(tmp_path: Path) -> None:
    """A module that raises on import is told with file and line, not with a traceback."""
    broken = tmp_path / "broken_engine.py"
    broken.write_text("import sys\n\nraise RuntimeError('no GPU here')\n")

    with pytest.raises(AddressError) as caught:
        connect(f"py:{broken}:make")

    assert str(caught.value) == (
        f"py:{broken}:make: {broken} cannot be imported: RuntimeError: no GPU here at {broken}:3"
    )


def test_a_module_that_exits_is_an_error(tmp_path: Path) -> None:
    """A script that ends with sys.exit() when it is imported does not end the run with its exit code."""
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")

    with pytest.raises(AddressError, match="SystemExit: 0"):
        connect(f"py:{tmp_path / 'script.py'}:make")


def test_options_are_keyword_arguments() -> None:
    """The options of an address reach the factory as strings."""
    engine = connect(f"{FILE}:correct?name=a%20b&version=2")

    manifest = engine.describe()
    assert (manifest.name, manifest.version) == ("a b", "2")


def test_an_instance_is_taken_as_it_is() -> None:
    """An address may name an engine instead of a factory; the same file is loaded once."""
    assert connect(f"{FILE}:instance") is connect(f"{FILE}:instance")


def test_modules_beside_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`py:module:factory` sees the modules of the working directory, as `python -m` does."""
    (tmp_path / "engine_of_the_folder.py").write_text(
        f"import sys\nsys.path.append({str(HERE)!r})\nfrom miniature import correct\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])

    assert connect("py:engine_of_the_folder:correct").describe().name == "miniature"


def test_a_file_finds_what_lies_beside_it(tmp_path: Path) -> None:
    """A single file may import its neighbours, and its dataclasses work."""
    (tmp_path / "neighbour_of_engine.py").write_text("NAME = 'beside'\n")
    (tmp_path / "one_file.py").write_text(
        "from __future__ import annotations\n"
        "import dataclasses, sys\n"
        f"sys.path.append({str(HERE)!r})\n"
        "from miniature import correct\n"
        "from neighbour_of_engine import NAME\n"
        "@dataclasses.dataclass\n"
        "class Options:\n"
        "    name: str\n"
        "def make():\n"
        "    return correct(name=Options(NAME).name)\n"
    )

    assert connect(f"py:{tmp_path / 'one_file.py'}:make").describe().name == "beside"


def test_other_packages_register_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the entry-point group `kvshard.engines` is an address, listed with where it comes from."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvshard.engines]\nmini = miniature:correct\nbroken = no_such_module:make\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    built_in = [("ref", "built in"), ("sglang", "built in")]
    assert engines() == [*built_in, ("broken", "no_such_module:make"), ("mini", "miniature:correct")]
    assert connect("mini?name=other").describe().name == "other"
    with pytest.raises(AddressError, match="broken: no_such_module:make cannot be imported"):
        connect("broken")


def test_the_reference_checks_its_own_options() -> None:
    """A wrong option of `ref` is the reference's message behind the address."""
    with pytest.raises(AddressError, match=r"^ref\?shard=4: .*'shard'"):
        connect("ref?shard=4")


def test_an_engine_has_two_methods() -> None:
    """What lacks `describe` or `open` is no engine."""
    with pytest.raises(AddressError, match="here gave a object without describe and open"):
        check_engine(object(), "here")


class Describing(Miniature):
    """Describes itself with whatever it is given."""

    answer: Any = None

    def describe(self) -> Manifest:
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: Manifest = self.answer
        return answer


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (OSError("no weights"), "here: describe() raised OSError: no weights"),
        ("me", "here: describe() gave a str; expected a harness.types.Manifest"),
        (msgspec.structs.replace(MANIFEST, ops=("fly",)), "claims 'op.fly', which is no capability"),
    ],
)
def test_a_manifest_claims_only_what_exists(answer: object, part: str) -> None:
    """A broken `describe` and a claim that is no capability are told with the address."""
    engine = Describing()
    engine.answer = answer

    with pytest.raises(AddressError) as caught:
        manifest_of(engine, "here")

    assert part in str(caught.value)
