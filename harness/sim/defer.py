"""Deferred operations: what an operation will return is known before it runs, and holds poison until then."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from harness.sim.race import UnknownOp

Tag = torch.Tag
_pointer = torch._C.TensorBase.data_ptr  # noqa: SLF001 - Tensor.data_ptr is patched while a device is active


class Kind(Enum):
    """How an operation is treated."""

    VIEW = "no data is touched: at once"
    EMPTY = "memory without content: at once, and poison"
    LIFT = "values from outside come to the device: they are there at once"
    RESHAPE = "a tensor object gets another shape or memory: at once, pending work keeps what it had"
    ANSWER = "the host needs the values: the host waits"
    DATA = "reads and writes data: in stream order"


class Fresh(NamedTuple):
    """A tensor that an operation makes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Operand(NamedTuple):
    """An argument that an operation returns: its place and its shape after the operation."""

    place: int | str
    shape: torch.Size


class Constant(NamedTuple):
    """A value that depends on shapes only."""

    value: Any


Recipe: TypeAlias = "Fresh | Operand | Constant | tuple[Recipe, ...]"


class Op(NamedTuple):
    """What is known of an operation by its schema and tags."""

    func: OpOverload
    name: str
    kind: Kind
    masks: bool
    """Whether its second argument is a list of indices, where a mask can make the host wait."""
    draws: bool
    """Whether it draws random numbers."""
    returned: tuple[int | str | None, ...]
    """Per return the argument that it is, or None for something new."""


EMPTY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
# queries without a tag that would tell; they look at shapes and flags only
METADATA = frozenset(
    """
    size stride dim numel storage_offset sym_size sym_stride sym_numel sym_storage_offset sym_is_contiguous
    is_contiguous is_pinned is_same_size is_set_to is_complex is_floating_point is_inference is_signed
    is_non_overlapping_and_dense is_strides_like_format is_neg is_conj is_leaf element_size result_type
    get_device output_nr _version _is_zerotensor _has_compatible_shallow_copy_type _has_same_storage_numel
    _assert_tensor_metadata _debug_has_internal_overlap _fused_sdp_choice
    """.split()  # noqa: SIM905 - forty names read better as a text
)
VIEWS = frozenset({"_reshape_alias"})
LIFTS = frozenset({"lift_fresh"})
RESHAPES = frozenset({"set_", "resize_", "resize_as_"})
MASKS = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})


def classify(func: OpOverload) -> Op:
    """The op of an overload. Raises UnknownOp for one that hands values to the host without saying so by a tag."""
    schema = func._schema  # noqa: SLF001 - an overload has no public schema
    aten, _, name = schema.name.partition("::")
    writes = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    tensors = [value for value in schema.returns if "Tensor" in str(value.type)]
    views = any(value.alias_info and not value.alias_info.is_write for value in schema.returns)
    masks = aten == "aten" and name in MASKS
    answers = Tag.dynamic_output_shape in func.tags or Tag.data_dependent_output in func.tags
    if Tag.inplace_view in func.tags or (aten == "aten" and name in RESHAPES):
        kind = Kind.RESHAPE
    elif answers and not masks:
        kind = Kind.ANSWER
    elif aten == "aten" and name in LIFTS:
        kind = Kind.LIFT
    elif not writes and (views or (aten == "aten" and name in METADATA | VIEWS)):
        kind = Kind.VIEW
    elif aten == "aten" and name in EMPTY:
        kind = Kind.EMPTY
    elif not writes and not tensors:
        raise UnknownOp(
            f"{func}: it returns no tensor, and no tag says whether it needs values; expected one of the known queries "
            "of shapes. Give it the tag data_dependent_output, or run it as a host_callback of the device"
        )
    else:
        kind = Kind.DATA
    named = {
        next(iter(argument.alias_info.before_set)): argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write and argument.alias_info.before_set
    }
    returned = tuple(
        named[next(iter(value.alias_info.before_set))] if value.alias_info and value.alias_info.is_write else None
        for value in schema.returns
    )
    return Op(func, str(func), kind, masks, Tag.nondeterministic_seeded in func.tags, returned)


class Shapes:
    """What operations return, by the shapes, strides and dtypes of their arguments; may serve many simulations."""

    def __init__(self) -> None:
        self.ops: dict[OpOverload, Op] = {}
        self._recipes: dict[Any, tuple[Recipe, ...]] = {}

    def op(self, func: OpOverload) -> Op:
        """What is known of an operation."""
        op = self.ops.get(func)
        if op is None:
            op = self.ops[func] = classify(func)
        return op

    def recipes(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Recipe, ...]:
        """What the operation will return, one entry per return.

        Raises what the operation raises for such shapes, and UnknownOp when it cannot tell without values.
        """
        key = (op.func, _key(args), _key(tuple(kwargs.items())) if kwargs else None)
        recipes = self._recipes.get(key)
        if recipes is None:
            recipes = self._recipes[key] = self._infer(op, args, kwargs)
        return recipes

    @staticmethod
    def _infer(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Recipe, ...]:
        shadows = {name: _shadow(value) for name, value in kwargs.items() if name != "generator"}
        if any(argument.name == "device" for argument in op.func._schema.arguments):  # noqa: SLF001 - see classify
            shadows["device"] = torch.device("meta")
            shadows.pop("pin_memory", None)
        try:
            result = op.func(*_shadow(args), **shadows)
        except NotImplementedError as error:
            raise UnknownOp(
                f"{op.name}: it cannot tell the shape of its result without values ({error}); register a fake kernel "
                "for it, or run it as a host_callback of the device"
            ) from error
        results = result if isinstance(result, list | tuple) and len(op.returned) > 1 else (result,)
        return tuple(
            _recipe(part) if place is None else Operand(place, part.shape if isinstance(part, Tensor) else torch.Size())
            for part, place in zip(results, op.returned, strict=False)
        )


class Deferred:
    """An operation that waits to run. `outs` holds what it will return, in the shape in which it returns it."""

    __slots__ = ("args", "kwargs", "op", "outs", "ran", "seed")

    def __init__(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Any, seed: int | None) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.outs = outs
        self.seed = seed
        self.ran: Callable[[Deferred], None] | None = None  # called when it has run

    def __call__(self) -> None:
        """Run it and fill what it returned."""
        result = call(self.op, self.args, self.kwargs, self.seed)
        if isinstance(result, Tensor):
            if result is not self.outs:
                self.outs.copy_(result)
        else:
            _fill(self.outs, result)
        if self.ran is not None:
            self.ran(self)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that it will use."""
        return tensors_in([self.args, [*self.kwargs.values()], self.outs])

    def replace(self, tensor: Tensor, alias: Tensor) -> None:
        """Use `alias` for `tensor`, which is about to become something else."""
        self.args = _replaced(self.args, tensor, alias)
        self.kwargs = {name: _replaced(value, tensor, alias) for name, value in self.kwargs.items()}
        self.outs = _replaced(self.outs, tensor, alias)


def call(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int | None) -> Any:
    """Run an operation; one that draws random numbers draws them from `seed`, whatever the order of operations."""
    if seed is None:
        return op.func(*args, **kwargs)
    generator = kwargs.get("generator") or torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        return op.func(*args, **kwargs)
    finally:
        generator.set_state(state)


def drawn(kwargs: Mapping[str, Any]) -> int:
    """A seed from the generator of an operation."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=kwargs.get("generator")).item())


def promised(recipes: Sequence[Recipe], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensors that an operation will fill, poisoned; an `out` of another shape is resized."""
    if len(recipes) == 1:
        return _promise(recipes[0], args, kwargs)
    return tuple(_promise(recipe, args, kwargs) for recipe in recipes) if recipes else None


def poison(tensor: Tensor) -> None:
    """Fill a new tensor's memory with what no right program computes: NaN, far out of range integers, True."""
    if tensor.numel() and tensor.is_cpu:
        dtype = tensor.dtype
        byte = 0xFF if dtype.is_floating_point or dtype.is_complex else 0x01 if dtype is torch.bool else 0xA5
        ctypes.memset(_pointer(tensor), byte, _extent(tensor) * dtype.itemsize)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def has_mask(args: Sequence[Any]) -> bool:
    """Whether an index in these arguments is a mask whose true places must be counted on the host first."""
    indices = args[1]
    masks = [index for index in indices if index is not None and index.dtype in {torch.bool, torch.uint8}]
    if len(masks) == len(indices) == 1 and len(args) == 3 and args[2].numel() == 1:
        return False  # one value at one mask is a masked fill, which counts nothing
    return bool(masks)


def _extent(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _key(value: Any) -> Any:
    """A hashable value that decides what an operation returns."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_key(part) for part in value])
    if isinstance(value, bool | float | complex):
        return type(value), str(value)
    return None if isinstance(value, torch.Generator) else value


def _shadow(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_cpu or value.layout is not torch.strided:
            raise UnknownOp(
                f"a tensor on {value.device} of layout {value.layout}: only strided tensors on the CPU can wait for "
                "their values; use it outside of the device's active()"
            )
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return [_shadow(part) for part in value]
    return value


def _recipe(result: Any) -> Recipe:
    if isinstance(result, Tensor):
        return Fresh(result.shape, result.stride(), result.dtype)
    if isinstance(result, list | tuple):
        return tuple(_recipe(part) for part in result)
    return Constant(result)


def _promise(recipe: Recipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(recipe, Fresh):
        tensor = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype)
        poison(tensor)
        return tensor
    if isinstance(recipe, Operand):
        operand = args[recipe.place] if isinstance(recipe.place, int) else kwargs[recipe.place]
        if isinstance(operand, Tensor) and operand.shape != recipe.shape:
            operand.resize_(recipe.shape)
            poison(operand)
        return operand
    return recipe.value if isinstance(recipe, Constant) else [_promise(part, args, kwargs) for part in recipe]


def _fill(outs: Any, result: Any) -> None:
    if isinstance(result, Tensor):
        if result is not outs:
            outs.copy_(result)
    elif isinstance(result, list | tuple):
        for out, part in zip(outs, result, strict=True):
            _fill(out, part)


def _replaced(value: Any, tensor: Tensor, alias: Tensor) -> Any:
    if value is tensor:
        return alias
    if isinstance(value, list | tuple):
        return type(value)(_replaced(part, tensor, alias) for part in value)
    return value
