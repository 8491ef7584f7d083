"""The files of a pull request, as data: names and text, never imported, never run; symbolic links are not followed."""

from __future__ import annotations

import ast
import difflib
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ci.comment_parse import GLOB_CHARACTERS, PARTS, Bad, shown

TREE_FILES_MAX = 20_000
FILE_BYTES_MAX = 400_000
CANDIDATES_SHOWN = 5
TEST_FILE = re.compile(r"test_[^/]*\.py")


@dataclass(frozen=True, slots=True)
class Tree:
    """The test folders of a pull request: which files there are, and the text of each."""

    folders: tuple[str, ...]
    paths: frozenset[str]
    read_text: Callable[[str], str]
    links: frozenset[str] = field(default=frozenset())

    @property
    def tests(self) -> list[str]:
        """The test files, by name."""
        return sorted(path for path in self.paths if self.is_test(path))

    def is_test(self, path: str) -> bool:
        """Whether a path is one of a test file in a test folder."""
        return path.startswith(tuple(f"{folder}/" for folder in self.folders)) and bool(
            TEST_FILE.fullmatch(path.rpartition("/")[2])
        )


def tree_of(files: Mapping[str, str], folders: Iterable[str]) -> Tree:
    """A tree that is given as path -> text."""
    return Tree(tuple(folders), frozenset(files), files.__getitem__)


def tree_in(root: Path, folders: Iterable[str]) -> Tree:
    """The tree in a folder on disk; raises `Bad` when it holds too many files."""
    tops = tuple(folders)
    paths: set[str] = set()
    links: set[str] = set()
    for path, is_link in (entry for top in tops for entry in walk(root, top)):
        (links if is_link else paths).add(path)
        if len(paths) + len(links) > TREE_FILES_MAX:
            raise Bad(f"the test folders hold more than {TREE_FILES_MAX} files", "take out what is no source")
    return Tree(tops, frozenset(paths), lambda path: text_of(root / path), frozenset(links))


def walk(root: Path, folder: str) -> Iterator[tuple[str, bool]]:
    """All files below a folder, and whether each is a symbolic link; links to folders are not entered."""
    here = root / folder
    if here.is_symlink():
        yield folder, True
        return
    if not here.is_dir():
        return
    with os.scandir(here) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = f"{folder}/{entry.name}"
            if entry.is_symlink():
                yield path, True
            elif entry.is_dir(follow_symlinks=False):
                yield from walk(root, path)
            elif entry.is_file(follow_symlinks=False):
                yield path, False


def text_of(path: Path) -> str:
    """The text of a plain file; raises `Bad`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:  # noqa: PTH123 - a handle, opened so that no link is followed
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise Bad("it is no plain file", "a test is a file of its own")
            if about.st_size > FILE_BYTES_MAX:
                raise Bad(f"it has {about.st_size} bytes", f"a test file has at most {FILE_BYTES_MAX}")
            return file.read(FILE_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Bad(f"it cannot be read ({type(error).__name__})", "a test is a plain file in UTF-8") from None


def resolve(spec: str, tree: Tree) -> list[tuple[str, str]]:
    """The files of a spec, each with what is named behind `::`; raises `Bad` with the candidates."""
    parts = PARTS.fullmatch(spec)
    if parts is None:
        raise Bad("it names no test", "write a file, a folder or a glob")
    path, tests = parts["path"], parts["tests"] or ""
    if GLOB_CHARACTERS & set(path):
        return [(file, "") for file in expand(path, tree)]
    if path.endswith("/") or not path.endswith(".py"):
        return [(file, "") for file in in_folder(path.removesuffix("/"), tree)]
    file = one_file(path, tree)
    return [(file, node_id(tree.read_text(file), tests) if tests else "")]


def places(path: str, tree: Tree) -> list[str]:
    """Where a path may lead: from the root, or from a test folder."""
    if path.partition("/")[0] in tree.folders:
        return [path]
    return [path, *(f"{folder}/{path}" for folder in tree.folders)]


def one_file(path: str, tree: Tree) -> str:
    """The one test file that a path or a bare name means; raises `Bad`."""
    found = [place for place in places(path, tree) if place in tree.paths]
    if "/" not in path:
        found = [file for file in sorted(tree.paths) if file.rpartition("/")[2] == path]
    if len(found) > 1:
        raise Bad(f"{len(found)} files are meant by it", f"name one of {listed(found)}")
    if found and not tree.is_test(found[0]):
        raise Bad("it is no test file", "tests are in files named `test_*.py`")
    if found:
        return found[0]
    if any(f"{place}/".startswith(f"{link}/") for place in places(path, tree) for link in tree.links):
        raise Bad("it is, or is in, a symbolic link", "links are not followed; name the file itself")
    raise Bad("there is no such file in the pull request", near(path, tree))


def expand(pattern: str, tree: Tree) -> list[str]:
    """The test files that a glob means, a folder's included; raises `Bad` when there are none."""
    wanted = [place.removesuffix("/").split("/") for place in places(pattern, tree)]
    found = [file for file in tree.tests if any(matches(file.split("/"), want) for want in wanted)]
    if "/" not in pattern:
        found += [file for file in tree.tests if fnmatch.fnmatchcase(file.rpartition("/")[2], pattern)]
    if not found:
        raise Bad("no test file matches it", "`*` stays within a folder's name; names begin with `test_`")
    return sorted(set(found))


def matches(file: list[str], pattern: list[str]) -> bool:
    """Whether the pattern's parts match the first parts of a path; a folder that matches stands for what is in it."""
    return len(pattern) <= len(file) and all(map(fnmatch.fnmatchcase, file, pattern))


def in_folder(path: str, tree: Tree) -> list[str]:
    """The test files below a folder; raises `Bad`."""
    found = {place: [file for file in tree.tests if file.startswith(f"{place}/")] for place in places(path, tree)}
    held = [place for place, files in found.items() if files]
    if len(held) > 1:
        raise Bad(f"{len(held)} folders are meant by it", f"name one of {listed(held)}")
    if not held:
        raise Bad("there is no such file or folder with tests in the pull request", near(path, tree))
    return found[held[0]]


def near(path: str, tree: Tree) -> str:
    """Advice for a name that is not there."""
    names = {file.rpartition("/")[2]: file for file in tree.tests[:5000]}
    wanted = path.rpartition("/")[2]
    close = difflib.get_close_matches(wanted if wanted.endswith(".py") else f"{wanted}.py", names, 3, 0.7)
    if close:
        return f"did you mean {listed([names[name] for name in close])}?"
    return "write a path from the root or from a test folder, or the bare name of one file"


def listed(paths: Iterable[str]) -> str:
    """Some paths, for a sentence."""
    names = sorted(paths)
    more = f" and {len(names) - CANDIDATES_SHOWN} more" if len(names) > CANDIDATES_SHOWN else ""
    return ", ".join(f"`{shown(name)}`" for name in names[:CANDIDATES_SHOWN]) + more


def node_id(text: str, tests: str) -> str:
    """`Class.method` as pytest names it, once it is seen to exist; raises `Bad` with what there is."""
    first, _, second = tests.replace("::", ".").partition(".")
    nodes = {node.name: node for node in parsed(text).body if isinstance(node, ast.ClassDef | FUNCTIONS)}
    if first not in nodes:
        raise Bad(f"there is no `{first}` in it", f"it has {listed(tested(nodes)) or 'no tests'}")
    node = nodes[first]
    if not second:
        if isinstance(node, FUNCTIONS) and not tested([first]):
            raise Bad(f"`{first}` is no test", f"it has {listed(tested(nodes)) or 'no tests'}")
        return first
    methods = {inner.name for inner in node.body if isinstance(inner, FUNCTIONS)}
    inherits = isinstance(node, ast.ClassDef) and bool(node.bases)  # a method may come from a class in another file
    if not isinstance(node, ast.ClassDef) or (second not in methods and not inherits):
        raise Bad(f"there is no `{second}` in `{first}`", f"it has {listed(tested(methods)) or 'no tests'}")
    if not tested([second]):  # pytest and unittest would run nothing
        raise Bad(f"`{second}` is no test", f"it has {listed(tested(methods)) or 'no tests'}")
    return f"{first}::{second}"


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def tested(names: Iterable[str]) -> list[str]:
    """The names that pytest collects."""
    return [name for name in names if name.lower().startswith("test")]


def parsed(text: str) -> ast.Module:
    """The syntax tree of foreign text, which is never run; raises `Bad`."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Bad("it is no Python that can be parsed", "run it once before asking for a runner") from None
