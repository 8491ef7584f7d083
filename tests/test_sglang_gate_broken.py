"""The table sees a gate that is wrong: every small change of the gate's source is noticed by some row, or is listed."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest

from ci.register import register_cpu_ci
from harness.adapters.sglang_gate import absent, verdict
from harness.adapters.sglang_gate_table import actual, expected, launch, load
from harness.fault import ANNOTATIONS, Edit, function_at, planted

register_cpu_ci(est_time=25, stage="commit", runner="ubuntu-sglang")

pytestmark = [
    pytest.mark.slow,  # sglang takes many seconds to import
    pytest.mark.skipif(bool(absent()), reason=absent()),
]
TABLE = load()
LAUNCHES = {row.id: launch(TABLE, row) for row in TABLE.row}
WANTED = {row.id: expected(row, row.warn) for row in TABLE.row}
HOOK = "sglang.srt.arg_groups.kv_shard_hook"
GATE, BACKENDS = f"{HOOK}:handle_kv_cache_sharding", f"{HOOK}:validate_kv_shard_attention_backend"
FLIPPED = {
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# Changes that no configuration can show, each with its reason.
SAME: Mapping[str, str] = MappingProxyType(
    {
        "31: without: cfg": "the other part is a view of the same",
        "31: without: resolving_view(server_args)": "the gate always hands a view over",
        "297: without: {}": "a configuration that sglang resolves always has its raw input",
        "301: more: 0": "the smallest amount that is more than nothing is 1.5",
    }
)


class Mutant(NamedTuple):
    """The gate with one change."""

    name: str
    function: FunctionType
    tree: ast.Module


def mutants() -> Iterator[Mutant]:
    """Each refusal away; each part of a condition away; each comparison turned; each number more."""
    for target in (GATE, BACKENDS):
        function = function_at(target)
        source = textwrap.dedent(inspect.getsource(function))
        for at, node in enumerate(ast.walk(ast.parse(source))):
            for name, change in changes_of(node):
                tree = ast.parse(source)
                change(list(ast.walk(tree))[at])
                line = function.__code__.co_firstlineno + getattr(node, "lineno", 1) - 1
                yield Mutant(f"{line}: {name}", function, tree)


def changes_of(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """What can be done to a node of this kind, in place."""
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
        yield f"never: {ast.unparse(node.test)}", never
    if isinstance(node, ast.BoolOp):
        for at, value in enumerate(node.values):
            yield f"without: {ast.unparse(value)}", partial(drop, at=at)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
        yield f"turned: {ast.unparse(node)}", turn
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        yield f"more: {node.value}", more


def never(node: ast.If) -> None:
    node.test = ast.Constant(value=False)


def drop(node: ast.BoolOp, at: int) -> None:
    node.values[at] = ast.Constant(value=isinstance(node.op, ast.And))


def turn(node: ast.Compare) -> None:
    node.ops[0] = FLIPPED[type(node.ops[0])]()


def more(node: ast.Constant) -> None:
    assert isinstance(node.value, int | float)
    node.value += 1 if isinstance(node.value, int) else 0.5


def compiled(mutant: Mutant) -> CodeType:
    code = compile(ast.fix_missing_locations(mutant.tree), mutant.function.__code__.co_filename, "exec", ANNOTATIONS)
    return next(
        each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == mutant.function.__name__
    )


def noticed() -> Iterator[str]:
    """The rows of which the gate says something else. An error that is no refusal is something else, too."""
    for id_, ask in LAUNCHES.items():
        try:
            said = actual(TABLE, verdict(ask.flags, ask.model, ask.host))
        except Exception:  # noqa: BLE001 - whatever a wrong gate raises
            yield id_
            continue
        if said != WANTED[id_]:
            yield id_


class TestEveryChange:
    def test_noticed(self) -> None:
        """Every change of the source is noticed by a row, but for those that change no verdict."""
        assert [] == list(noticed())
        survived, tried = [], 0
        for mutant in mutants():
            tried += 1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(mutant.function, "__code__", compiled(mutant))
                if next(noticed(), None) is None:
                    survived.append(mutant.name)
        assert (sorted(SAME), True) == (sorted(survived), tried > 140), tried

    def test_swapped_reasons(self) -> None:
        """A reason that is told in another's place is noticed, for each of the reasons."""
        unnoticed = []
        for id_, other in zip(TABLE.reason, [*list(TABLE.reason)[1:], next(iter(TABLE.reason))], strict=True):
            texts = {TABLE.reason[id_].text: TABLE.reason[other].text}
            with mock.patch.object(importlib.import_module(HOOK), "ValueError", told_as(texts), create=True):
                seen = set(noticed())
            if seen != {row.id for row in TABLE.row if row.refuse == id_}:
                unnoticed.append(id_)
        assert [] == unnoticed


def told_as(texts: dict[str, str]) -> Callable[[str], ValueError]:
    """A ValueError with another text in the place of these."""

    def made(message: str) -> ValueError:
        return ValueError(next((other for text, other in texts.items() if text in message), message))

    return made


class TestPlanted:
    @pytest.mark.parametrize(
        ("target", "old", "new", "rows"),
        [
            (GATE, "if cfg.enable_lmcache:", "if False:", {"lmcache"}),
            (BACKENDS, "cfg.pp_size != 1", "False", {"dsa.pp-2", "speculative.pp-2"}),
            (GATE, "does not support --enable-lmcache.", "does not support --enable-flexkv.", {"lmcache"}),
            (
                GATE,
                "// page_size * page_size",
                "// page_size * page_size + page_size",
                {row.id for row in TABLE.row if "chunked_prefill_size" in row.adjust},
            ),
            (
                GATE,
                "activation_delta_mb = 1.5 *",
                "activation_delta_mb = 1.0 *",
                {row.id for row in TABLE.row if "mem_fraction_static" in row.adjust}
                | {"memory.consumed", "memory.consumed.exactly"},
            ),
            (
                GATE,
                "graph_config = with_phase(graph_config, Phase.DECODE, backend=Backend.DISABLED)",
                "",
                {"graph.decode-full.mtp", "graph.decode-breakable.mtp", "graph.both.mtp", "all-adjusted"},
            ),
            (
                GATE,
                'BACKEND.set("python")',
                'BACKEND.set("rust")',
                {"core.unset", "core.unset.radix-off", "all-adjusted"},
            ),
        ],
        ids=["rule", "condition", "reason", "page", "memory", "graph", "core"],
    )
    def test_rows(self, target: str, old: str, new: str, rows: set[str]) -> None:
        """Of each of these faults exactly the rows with it tell."""
        with planted((Edit(target, old, new),)) as reached:
            seen = set(noticed())
        assert (rows, True) == (seen, reached.times > 0)
