"""Checks of the shape of this project that no linter makes: `python ci/tidy.py [ROOT]`, standard library only.

Exit code 0 when all is tidy, 1 with findings. Every finding says where, what, the limit, and the next step. The tables
below are the rules; a new module of harness/ is added to `HARNESS_LAYERS` in the layer that holds what it is for.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
REFERENCE_CODE_LINES_MAX = 2000
REFERENCE_UNCOUNTED = ("kvshard_ref/server/", "kvshard_ref/model.py")  # files and folders

# folder -> project folders it may import; tests may import all of them
MAY_IMPORT = {
    "kvshard_ref": ("kvshard_ref",),
    "fixtures": ("fixtures",),
    "harness": ("harness", "fixtures"),
    "suites": ("suites", "harness", "fixtures"),
    "ci": ("ci", "harness", "suites", "fixtures"),
    "tests": ("tests", "ci", "harness", "suites", "fixtures", "kvshard_ref"),
}
# file or folder -> third-party packages, for the one folder that is held to a list
REFERENCE_PACKAGES = {
    "kvshard_ref/model.py": ("torch", "safetensors"),
    "kvshard_ref/server/": (
        "torch",
        "numpy",
        "safetensors",
        "tokenizers",
        "fastapi",
        "pydantic",
        "starlette",
        "uvicorn",
        "prometheus_client",
    ),
}
REFERENCE_PACKAGES_DEFAULT = ("torch", "numpy")

HARNESS_LAYERS = tuple(map(tuple, tomllib.loads((Path(__file__).parent / "layers.toml").read_text())["layers"]))
KNOW_THE_REFERENCE = ("harness.adapters", "harness.capacity", "harness.transports")  # and names that go on from these
MAKE_THE_MODEL = ("ci.train_model", "ci.model_eval", "ci.model_page")  # they train, ask and describe it
SUITES_NEVER_IMPORT = ("harness.adapters", "harness.cli")

FAULTS_OF_AN_ENGINE = "suites/selfcheck/"
FAULT_FILES = "fixtures/faults/"  # of engines that are not this project's: data, in the form that harness.fault gives
ENGINE_NAMES = re.compile(r"sglang|vllm|trtllm|tensorrt[-_]?llm", re.IGNORECASE)
BUG_IDS = re.compile(r"[\w.-]+#\d+")  # a public bug may be cited, as in engine#12345
REFERENCE_ADDRESS = re.compile(r"ref(\?.*)?", re.DOTALL)

# an ignore of a linter or of mypy with nothing behind it but another one
BARE_IGNORES = re.compile(r"(# *(noqa: *[A-Z0-9, ]+|type: *ignore\[[\w, -]+\]) *)+")
CONTAINERS = re.compile(
    r"((collections|itertools|weakref|threading|types)\.)?"
    "(list|dict|set|bytearray|deque|defaultdict|OrderedDict|Counter|ChainMap|count|cycle"
    "|Weak(KeyDictionary|ValueDictionary|Set)|SimpleNamespace|local)"
)
MUTATORS = re.compile("add|append(left)?|clear|discard|extend|insert|pop(item|left)?|remove|setdefault|sort|update")


class Finding(NamedTuple):
    """One thing to put right."""

    path: str
    line: int
    what: str
    limit: str
    step: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}; limit: {self.limit}; next step: {self.step}"


class Source(NamedTuple):
    """One Python file: its path below the root, its dotted module name, text and tree."""

    path: str
    module: str
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        """The top-level folder it is in."""
        return self.path.split("/", 1)[0]

    @property
    def is_init(self) -> bool:
        """Whether it is the __init__ of a package."""
        return self.path.endswith("__init__.py")


class Import(NamedTuple):
    """One imported module, wherever in the file the import stands."""

    module: str
    line: int


def read(root: Path) -> tuple[list[Source], list[Finding]]:
    """All Python files of the project folders, and a finding for each that does not parse."""
    sources, findings = [], []
    for path in sorted(path for folder in MAY_IMPORT for path in (root / folder).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            findings.append(Finding(name, error.lineno or 1, f"no Python: {error.msg}", "every file parses", "fix it"))
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        sources.append(Source(name, module, text, tree))
    return sources, findings


def sizes(source: Source) -> Iterator[Finding]:
    """Files and functions are short."""
    lines = len(source.text.splitlines())
    if lines > FILE_LINES_MAX:
        what, limit = f"file of {lines} lines", f"{FILE_LINES_MAX} lines"
        yield Finding(source.path, 1, what, limit, "move one noun to a file of its own")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                what, limit = f"function {node.name} of {lines} lines", f"{FUNCTION_LINES_MAX} lines"
                yield Finding(source.path, node.lineno, what, limit, "give its steps names as functions")


def code_lines(source: Source) -> int:
    """Lines with code: blank lines, comments and docstrings do not count."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in docstrings(source.tree):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """The docstring statements of the module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first


def reference_sizes(sources: Iterable[Source]) -> dict[str, int]:
    """Code lines per file of the reference that counts."""
    counted = (s for s in sources if s.folder == "kvshard_ref" and not s.path.startswith(REFERENCE_UNCOUNTED))
    return {source.path: code_lines(source) for source in counted}


def reference_size(sources: Iterable[Source]) -> Iterator[Finding]:
    """The reference stays compact."""
    total = sum(reference_sizes(sources).values())
    if total > REFERENCE_CODE_LINES_MAX:
        what, limit = f"the reference has {total} code lines", f"{REFERENCE_CODE_LINES_MAX}"
        yield Finding("kvshard_ref/__init__.py", 1, what, limit, "take out as much as went in")


def imports(source: Source, modules: frozenset[str]) -> Iterator[Import]:
    """All imports: those in functions and under TYPE_CHECKING too; `from a import b` is a.b where that is a module."""
    package = source.module if source.is_init else source.module.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for name in {f"{base}.{alias.name}" for alias in node.names}:
                yield Import(name if name in modules else base, node.lineno)


def directions(source: Source, modules: frozenset[str]) -> Iterator[Finding]:
    """Imports go one way between folders, between the layers of harness, and in the reference out to a short list."""
    for module, line in sorted(set(imports(source, modules))):
        for wrong, limit, step in (*folder_rules(source, module), *layer_rules(source.module, module)):
            yield Finding(source.path, line, f"{source.module} imports {module}{wrong}", limit, step)


def folder_rules(source: Source, module: str) -> Iterator[tuple[str, str, str]]:
    """What is wrong with this import between folders."""
    top, allowed = module.partition(".")[0], MAY_IMPORT[source.folder]
    bridge = source.folder == "harness" and top == "kvshard_ref"
    if bridge and not source.module.startswith(KNOW_THE_REFERENCE):
        yield "", f"only {' and '.join(KNOW_THE_REFERENCE)}* know the reference", "reach it through harness.adapter"
    if source.path.startswith(FAULT_FILES):
        allowed = ("harness",)
    bridge = bridge or (top == "kvshard_ref" and source.module in MAKE_THE_MODEL)
    if top in MAY_IMPORT and top not in allowed and not bridge:
        yield "", f"{source.folder} imports {', '.join(allowed)} of this project", "turn the dependency around"
    if source.folder == "suites" and is_below(module, SUITES_NEVER_IMPORT):
        yield "", f"suites never import {' or '.join(SUITES_NEVER_IMPORT)}", "ask for a capability instead"
    special = (packages for place, packages in REFERENCE_PACKAGES.items() if source.path.startswith(place))
    packages = next(special, REFERENCE_PACKAGES_DEFAULT)
    if source.folder == "kvshard_ref" and top not in {*MAY_IMPORT, *packages, *sys.stdlib_module_names}:
        yield "", f"the reference imports {', '.join(packages)} and the standard library", "do without it"
    if is_below(module, ("harness.cli",)) and source.folder not in {"tests", "suites"}:
        yield "", "nothing imports harness.cli", "move what is shared to a module below it"


def layer_rules(importer: str, module: str) -> Iterator[tuple[str, str, str]]:
    """What is wrong with this import within harness."""
    if not (importer.startswith("harness.") and module.startswith("harness.")):
        return
    upper, lower = layer(importer), layer(module)
    same_package = importer.split(".")[1] == module.split(".")[1]
    if upper is not None and lower is not None and lower >= upper and not same_package and module != "harness.cli":
        wrong = f" (layer {upper} imports layer {lower})"
        yield (
            wrong,
            "harness imports lower layers only, see HARNESS_LAYERS",
            "move what is shared down, or the module up",
        )


def layer(module: str) -> int | None:
    """The layer of a module of harness; None for one that is in no layer."""
    name = module.split(".")[1]
    return next((at for at, names in enumerate(HARNESS_LAYERS) if name in names), None)


def layered(source: Source) -> Iterator[Finding]:
    """Every module of harness has its layer."""
    if source.module.startswith("harness.") and layer(source.module) is None:
        limit = "every module of harness/ is in HARNESS_LAYERS of ci/tidy.py"
        yield Finding(source.path, 1, f"{source.module} is in no layer", limit, "add it to the layer of its purpose")


def is_below(module: str, tops: tuple[str, ...]) -> bool:
    """Whether the module is one of `tops` or within one."""
    return any(module == top or module.startswith(f"{top}.") for top in tops)


def reexports(source: Source) -> Iterator[Finding]:
    """An __init__ holds a docstring, imports and __all__, nothing else."""
    if not source.is_init:
        return
    documentation = {node.lineno for node in docstrings(source.tree)}
    for node in source.tree.body:
        named = isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
        if not (named or isinstance(node, ast.Import | ast.ImportFrom) or node.lineno in documentation):
            limit = "an __init__ only re-exports: docstring, imports, __all__"
            yield Finding(source.path, node.lineno, f"code in {source.path}", limit, "move it to a module")


def engine_names(source: Source) -> Iterator[Finding]:
    """Suites know capabilities, never engines; a public bug may be cited by its id. Faults are of one engine."""
    if source.folder != "suites" or source.path.startswith(FAULTS_OF_AN_ENGINE):
        return
    limit = "suites name no engine, but for a bug id such as engine#123"
    step = "name the capability that the property needs"
    for line, text in enumerate(source.text.splitlines(), start=1):
        for name in ENGINE_NAMES.findall(BUG_IDS.sub("", text)):
            yield Finding(source.path, line, f"the engine name {name!r}", limit, step)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and REFERENCE_ADDRESS.fullmatch(node.value):
            yield Finding(source.path, node.lineno, f"the engine address {node.value!r}", limit, step)


def bare_ignores(source: Source) -> Iterator[Finding]:
    """Each ignore says why."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and BARE_IGNORES.fullmatch(token.string):
            what = f"an ignore without a reason: {token.string}"
            yield Finding(source.path, token.start[0], what, "every ignore says why", "write the reason behind it")


def process_state(source: Source) -> Iterator[Finding]:
    """Nothing changes that all of the process shares: module-level containers, globals, the environment."""
    limit = "no state that all of a process shares"
    shared = set() if source.folder == "tests" else {"os.environ", "environ"}  # a test may start a process of its own
    for statement in source.tree.body:
        for name in container_names(statement):
            if name == name.upper():
                shared.add(name)
            else:
                step = "make it an UPPER_CASE constant that never changes, or a field of an object"
                yield Finding(source.path, statement.lineno, f"module-level container {name}", limit, step)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            names, step = ", ".join(node.names), "make it a field of an object that is handed in"
            yield Finding(source.path, node.lineno, f"global {names}", limit, step)
        for target in changed(node):
            step = "build a new value, or hand the environment to the child process"
            if target in shared:
                yield Finding(source.path, getattr(node, "lineno", 1), f"{target} is changed", limit, step)


def container_names(node: ast.stmt) -> Iterator[str]:
    """The names to which a module-level statement binds a mutable container."""
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    for target, value in bindings(node):
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        mutable = isinstance(value, displays) or CONTAINERS.fullmatch(called)
        if mutable and isinstance(target, ast.Name) and not target.id.startswith(("__", "pytest")):
            yield target.id


def bindings(node: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Target and value of an assignment; `a, b = x, y` are two."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def changed(node: ast.AST) -> Iterator[str]:
    """What this node writes into: X in `X[k] = v`, `del X[k]` and `X.append(v)`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        yield ast.unparse(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and MUTATORS.fullmatch(node.func.attr):
        yield ast.unparse(node.func.value)


def check(root: Path) -> list[Finding]:
    """All findings below `root`, by file and line."""
    sources, findings = read(root)
    modules = frozenset(source.module for source in sources)
    for source in sources:
        for rule in (sizes, layered, reexports, engine_names, bare_ignores, process_state):
            findings.extend(rule(source))
        findings.extend(directions(source, modules))
    findings.extend(reference_size(sources))
    return sorted(findings)


def main(arguments: list[str]) -> int:
    """Print the sizes of the reference and the findings; return the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    counts = reference_sizes(read(root)[0])
    for path, lines in counts.items():
        print(f"{lines:6} {path}")
    print(f"{sum(counts.values()):6} code lines of the reference of {REFERENCE_CODE_LINES_MAX}, without docstrings")
    findings = check(root)
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings" if findings else "tidy")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
