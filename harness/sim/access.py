"""What an operation reads and writes: tensors by its schema and tags, exact cells where an index chooses them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from harness.sim import cells as choose
from harness.sim.cells import Cells
from harness.sim.race import UnknownOp


class Access(NamedTuple):
    """One operation's use of one tensor."""

    tensor: Tensor
    cells: Cells | None
    """The bytes of its storage; None for all elements of `tensor`."""
    write: bool
    fresh: bool = False
    """Whether the tensor is new memory, which this operation's stream allocates."""


class Call(NamedTuple):
    """The arguments of one call, by name."""

    places: Mapping[str, tuple[int, Any]]
    """Per argument its position and default."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def __call__(self, name: str) -> Any:
        """The argument, or its default."""
        position, default = self.places[name]
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Choice: TypeAlias = Callable[[Tensor, Call], Cells]


def read(tensor: Tensor) -> Access:
    """All elements of a tensor are read."""
    return Access(tensor, None, write=False)


def write(tensor: Tensor) -> Access:
    """All elements of a tensor are written."""
    return Access(tensor, None, write=True)


def _rows(tensor: Tensor, given: Call) -> Cells:
    return choose.rows(tensor, given("dim"), given("index"))


def _at(tensor: Tensor, given: Call) -> Cells:
    return choose.at(tensor, given("indices"))


def _along(tensor: Tensor, given: Call) -> Cells:
    return choose.along(tensor, given("dim"), given("index"))


def _flat(tensor: Tensor, given: Call) -> Cells:
    return choose.flat(tensor, given("index"))


def _where(tensor: Tensor, given: Call) -> Cells:
    return choose.where(tensor, given("mask"))


def _corner(tensor: Tensor, given: Call) -> Cells:
    return choose.corner(tensor, given("index").shape)


def _embedding(tensor: Tensor, given: Call) -> Cells:
    return choose.rows(tensor, 0, given("indices"))


# operation -> argument -> its cells; all other arguments count in full
CHOSEN: Mapping[str, Mapping[str, Choice]] = MappingProxyType(
    {
        "aten::index_select": {"self": _rows},
        "aten::index_copy_": {"self": _rows},
        "aten::index_add_": {"self": _rows},
        "aten::index_fill_": {"self": _rows},
        "aten::index_reduce_": {"self": _rows},
        "aten::index": {"self": _at},
        "aten::index_put_": {"self": _at},
        "aten::_index_put_impl_": {"self": _at},
        "aten::gather": {"self": _along},
        "aten::scatter_": {"self": _along, "src": _corner},
        "aten::scatter_add_": {"self": _along, "src": _corner},
        "aten::scatter_reduce_": {"self": _along, "src": _corner},
        "aten::take": {"self": _flat},
        "aten::put_": {"self": _flat},
        "aten::masked_fill_": {"self": _where},
        "aten::masked_scatter_": {"self": _where},
        "aten::masked_select": {"self": _where},
        "aten::embedding": {"weight": _embedding},
    }
)
# their results share the storage of an argument, which the schema does not say
VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})
# what they are called on gives them shape and dtype only
FACTORIES = re.compile(r"aten::(new_\w+|\w+_like)")
# a value from outside comes to the device
LIFTS = frozenset({"aten::lift", "aten::lift_fresh"})
METADATA = frozenset(
    f"aten::{name}"
    for name in (
        *("size", "stride", "dim", "numel", "storage_offset", "sym_size", "sym_stride", "sym_numel"),
        *("sym_storage_offset", "is_contiguous", "is_pinned", "is_same_size", "is_set_to"),
    )
)
# what they change is more than their schema says, or no data of a tensor
OPAQUE = frozenset(
    f"aten::{name}"
    for name in (
        *("set_", "resize_", "resize_as_", "record_stream", "rrelu_with_noise", "_cudnn_rnn"),
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"),
    )
)


class Operand(NamedTuple):
    """One argument that can hold tensors."""

    position: int
    name: str
    write: bool
    choice: Choice | None


class Rule(NamedTuple):
    """How to find the accesses of one operation."""

    operands: tuple[Operand, ...]
    fresh: bool
    """Whether results that are no argument are newly written memory."""
    places: Mapping[str, tuple[int, Any]]
    """Per argument its position and default."""


SILENT = Rule((), fresh=False, places={})
FRESH = Rule((), fresh=True, places={})


class Operations:
    """The accesses of operations; what `declare` adds holds for this object only."""

    def __init__(self) -> None:
        self._declared: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        self._rules: dict[OpOverload, Rule] = {}

    def declare(self, op: OpOverload | str, reads: Collection[str] = (), writes: Collection[str] = ()) -> None:
        """Say which arguments an operation reads and writes, by name; its results count as written.

        `op` is the operation or its name such as "mylib::fill_rows". Arguments named in neither are not touched.
        """
        name = op if isinstance(op, str) else op._schema.name  # noqa: SLF001 - the schema has no public name
        self._declared[name] = (frozenset(reads), frozenset(writes))
        self._rules = {}

    def accesses(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Access]:
        """What a call that has run did: reads first, then writes. A view or a query of metadata touches nothing.

        Raises UnknownOp for an operation outside of aten that was not declared, and for one whose schema does not
        tell all it does.
        """
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = self._rule(func)
        if rule is SILENT:
            return []
        operands, fresh, places = rule
        reads: list[Access] = []
        writes: list[Access] = []
        inputs: list[Tensor] = []
        count = len(args)
        for position, name, writing, choice in operands:
            value = args[position] if position < count else kwargs.get(name)
            for tensor in (value,) if isinstance(value, Tensor) else _tensors(value):
                inputs.append(tensor)
                if tensor.numel():
                    cells = None if choice is None else choice(tensor, Call(places, args, kwargs))
                    (writes if writing else reads).append(Access(tensor, cells, writing))
        if fresh:
            made = (result,) if isinstance(result, Tensor) else _tensors(result)
            writes += [
                Access(tensor, None, write=True, fresh=True)
                for tensor in made
                if tensor.numel() and not any(tensor is other for other in inputs)
            ]
        return reads + writes

    def _rule(self, func: OpOverload) -> Rule:
        schema = func._schema  # noqa: SLF001 - an overload has no public schema
        declared = self._declared.get(schema.name)
        if declared is None:
            if schema.name in VIEWS or schema.name in METADATA or torch.Tag.inplace_view in func.tags:
                return SILENT
            if schema.name in LIFTS or FACTORIES.fullmatch(schema.name):
                return FRESH
            if not schema.name.startswith("aten::") or schema.name in OPAQUE:
                raise UnknownOp(_unknown(func))
            aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
            if any(not alias.is_write for alias in aliases):
                return SILENT  # a view
        reads, writes = declared or (None, None)
        operands = []
        for position, argument in enumerate(schema.arguments):
            if "Tensor" not in str(argument.type):
                continue
            if declared is None:
                writing, used = argument.alias_info is not None and argument.alias_info.is_write, True
            else:
                writing, used = argument.name in (writes or ()), argument.name in (reads or ())
            if writing or used:
                choice = CHOSEN.get(schema.name, {}).get(argument.name) if declared is None else None
                operands.append(Operand(position, argument.name, writing, choice))
        missing = {*(reads or ()), *(writes or ())} - {operand.name for operand in operands}
        if missing:
            names = [argument.name for argument in schema.arguments]
            raise UnknownOp(f"declare({schema.name!r}): no tensor argument {sorted(missing)}, expected some of {names}")
        fresh = declared is not None or any(value.alias_info is None for value in schema.returns)
        places = {
            argument.name: (position, argument.default_value if argument.has_default_value() else None)
            for position, argument in enumerate(schema.arguments)
        }
        return Rule(tuple(operands), fresh, places)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value or in its lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []


def _unknown(func: OpOverload) -> str:
    return (
        f"{func}: it is not known which tensors this operation reads and writes; expected an aten operation whose "
        f"schema tells. Say it with declare({func._schema.name!r}, reads=[...], writes=[...]), by argument name"  # noqa: SLF001 - as above
    )
