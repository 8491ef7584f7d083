"""A planted fault is what it says while it is planted, is told when it runs, and leaves nothing behind."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.fault import NAME, Edit, Fault, FaultError, Swap, Variant, check, function_at, planted
from tests import fault_targets
from tests.fault_targets import Cupboard, Shelf, kind, names, opened, squared, total, twice

register_cpu_ci(est_time=10, stage="commit")

HERE = "tests.fault_targets"
TOTAL = f"{HERE}:total"
KIND = f"{HERE}:kind"
PUT = (("a", "b"), True, {"m": 1})  # what `put` gives


def fault(*changes: Edit | Swap, **others: Any) -> Fault:
    fields: dict[str, Any] = {"does": "It is wrong.", "kind": "order", "like": "B01", "breaks": ()}
    return Fault(id="wrong.one", changes=changes, **{**fields, **others})


@pytest.mark.parametrize(
    ("old", "new", "given", "expected"),
    [
        ("> LIMIT", "> 5", [7], 10),  # a part of a line
        ("step * ", "step + ", [2], 3),
        ("result = start", "result = start + 1", [1], 2),  # a whole line, written without its indentation
        ("            result += LIMIT", "result += 7", [12], 7),
        ("return result", "if result:\n    return -result\nreturn 100", [], 100),  # some lines for one
        ("    return result", "if result:\n    return -result\nreturn 100", [3], -3),
        ("result += value\nresult += value", "result += value", [-2], -2),
        ("\n        result += value\n        result += value\n    ", "\n        result -= value\n", [-2], 2),
        ("if value > LIMIT:\n    result += LIMIT\nelif value < 0:", "if value < 0:", [12], 12),
        ("for value in values:", "for value in values[1:]:", [1, 2], 2),
        ("result += step * value", "", [1, 2], 0),  # a line that is taken out
        ("start: int = 0", "start: int = 5", [1], 6),  # the arguments
        ("values: list[int], *, start: int = 0", "values, start=7, *", [1], 8),
    ],
)
def test_an_edit_changes_text(old: str, new: str, given: list[int], expected: int) -> None:
    """Part of a line, whole lines at any indentation, a line taken out, an argument: within, and no longer."""
    before = total(given)

    with planted([Edit(TOTAL, old, new)]):
        assert expected == total(given)

    assert before == total(given) != expected


def test_edits_of_one_function_add_up() -> None:
    """Several edits of one function and of others are in place together, and counted together."""
    edits = [
        Edit(TOTAL, "result = start", "result = start + 100"),
        Edit(TOTAL, "return result", "return result + 1000"),
        Edit(f"{HERE}:twice", "second = value", "second = 0"),
    ]

    with planted(edits) as reached:
        assert (1103, 3) == (total([3]), twice(3))

    assert 2 == reached.times
    assert (3, 6) == (total([3]), twice(3))


def test_a_swap_gets_the_original() -> None:
    """A function in its place is called with the original and the arguments as they were given, defaults too."""
    calls: list[object] = []

    def by(original: Callable[..., int], *given: object, **named: object) -> int:
        calls.append((given, named))
        return 10 * original(*given, **named)

    with planted([Swap(TOTAL, by)]) as reached:
        results = [total([1, 2]), total([1], step=3), total(values=[4], start=1)]

    assert [30, 30, 50] == results
    assert [(([1, 2],), {}), (([1],), {"step": 3}), ((), {"values": [4], "start": 1})] == calls
    assert (3, 3) == (reached.times, total([1, 2]))


def put() -> object:
    return Shelf().put("a", "b", spare=True, m=1)


def fresh(value: int) -> int:
    squared.cache_clear()
    return squared(value)


def entered() -> str:
    manager = opened([])
    return manager.__enter__()


def swapped(path: str, by: Callable[..., Any]) -> Swap:
    return Swap(f"{HERE}:{path}", by)


@pytest.mark.parametrize(
    ("change", "call", "right", "wrong"),
    [
        (Edit(f"{HERE}:Shelf.room", "size -", "size +"), lambda: Shelf(1).room(), 2, 4),
        (Edit(f"{HERE}:Shelf.full", "==", "!="), lambda: Shelf(1).full, False, True),
        (Edit(f"{HERE}:Shelf.of", "books)", "books + 1)"), lambda: Shelf.of(1), Shelf(1), Shelf(2)),
        (Edit(f"{HERE}:Shelf.weight", "2", "3"), lambda: Shelf(9).weight(2), 4, 6),
        (Edit(f"{HERE}:Shelf.put", "return titles,", "return titles[1:],"), put, PUT, (("b",), *PUT[1:])),
        (Edit(f"{HERE}:Cupboard.full", "==", "!="), lambda: Shelf(1).full, False, True),  # it is its base's
        (Edit(f"{HERE}:squared", "* value", "+ value"), lambda: fresh(3), 9, 6),
        (Edit(f"{HERE}:opened", '"it"', '"that"'), entered, "it", "that"),
        (swapped("Shelf.room", lambda original, shelf: original(shelf) - 1), lambda: Shelf(1).room(), 2, 1),
        (swapped("Shelf.full", lambda original, shelf: not original(shelf)), lambda: Shelf(1).full, False, True),
        (swapped("Shelf.of", lambda original, cls, books: cls(-books)), lambda: Shelf.of(1), Shelf(1), Shelf(-1)),
        (swapped("Shelf.weight", lambda original, books: original(books) + 1), lambda: Shelf.weight(2), 4, 5),
        (swapped("Shelf.put", lambda original, *given, **named: named), put, PUT, {"spare": True, "m": 1}),
        (swapped("opened", lambda original, what: iter(["other"])), entered, "it", "other"),
    ],
)
def test_every_kind_of_function_can_be_changed(
    change: Edit | Swap, call: Callable[[], object], right: object, wrong: object
) -> None:
    """Methods, properties, class methods, static methods, wrapped functions: with all their arguments."""
    with planted([change]) as reached:
        assert wrong == call()

    assert 1 == reached.times
    assert right == call()


def test_defaults_keep_their_values() -> None:
    """Defaults of a class's own names, and those that were changed since, stay unless the edit changes them."""
    room = Shelf.room
    before = room.__defaults__
    room.__defaults__ = (8,)
    try:
        with planted([Edit(f"{HERE}:Shelf.room", "size -", "size +")]):
            assert 8 == Shelf(0).room()
        assert (8,) == room.__defaults__
    finally:
        room.__defaults__ = before
    with planted([Edit(TOTAL, "return result", "return -result")]):
        assert {"start": 0, "step": 1} == total.__kwdefaults__


@pytest.mark.parametrize("change", [Edit(TOTAL, "start: int = 0", "start: int = 5"), Swap(TOTAL, lambda *_: 0)])
def test_nothing_stays(change: Edit | Swap) -> None:
    """Code, defaults and attributes are the same objects as before, also after an exception; a mark stays nowhere."""

    def state() -> list[object]:
        return [total.__code__, total.__defaults__, total.__kwdefaults__, total.__dict__, vars(fault_targets).get(NAME)]

    with planted([change]):
        pass
    before = [*state()]
    with pytest.raises(KeyError), planted([change]):
        raise KeyError(total.__code__ is before[0])

    assert before == state()
    assert before[0] is total.__code__
    assert [{}, {}] == before[3:]


def test_all_or_none() -> None:
    """When one of several changes cannot be planted, none is."""
    edits = [Edit(TOTAL, "return result", "return 0"), Edit(f"{HERE}:twice", "no such text", "0")]

    with pytest.raises(FaultError, match="found 0 times"), planted(edits):
        pytest.fail("planted")

    assert 3 == total([3])
    with planted(edits[:1]):
        assert 0 == total([3])


@pytest.mark.parametrize(
    ("target", "old", "new", "calls", "times"),
    [
        (TOTAL, "result += LIMIT", "result += 1", [[1], [-1], [11, 12]], [0, 0, 2]),
        (TOTAL, "result += LIMIT", "", [[1], [-1], [11, 12]], [0, 0, 2]),  # removed
        (TOTAL, "result += value\nresult += value", "", [[1], [-1], [11]], [0, 1, 0]),
        (TOTAL, "result += step * value", "result = value", [[1, 2], [-1], [11]], [2, 0, 0]),
        (TOTAL, "value < 0", "value < 5", [[1], [-1], [11]], [1, 1, 0]),  # the condition is all that differs
        (TOTAL, "value > LIMIT", "value > 5", [[], [1], [-1, 11]], [0, 1, 2]),
        (TOTAL, "return result", "return result + 1", [[], [1, 2]], [1, 1]),
        (TOTAL, "start: int = 0", "start: int = 1", [[], [1]], [1, 1]),
        (KIND, '"text"', '"words"', [1, "a", None], [0, 1, 0]),
        (KIND, "len(value)", "", [1, "a", None], [0, 1, 0]),
        (KIND, "case int()", "case int() | None", [1, None], [1, 1]),  # which arm it is, differs
        (KIND, '"worse"', '"worst"', [1, "a"], [0, 0]),
        (KIND, "except ValueError", "except KeyError", [1, "a"], [1, 1]),
        (KIND, "name = str(value)", "raise TypeError", [1, None], [0, 1]),
    ],
)
def test_only_what_runs_is_reached(target: str, old: str, new: str, calls: list[object], times: list[int]) -> None:
    """What is changed deep in blocks is reached when it runs, not when its function does; so is what was removed."""
    found = []
    for given in calls:
        with planted([Edit(target, old, new)]) as reached:
            function_at(target)(given)
        found.append(reached.times)

    assert times == found


def test_an_arm_that_runs_is_reached() -> None:
    """The handler of an exception counts once the exception came."""

    class Odd:
        def __str__(self) -> str:
            raise TypeError

    with planted([Edit(KIND, '"worse"', '"worst"')]) as reached:
        assert ("text", 0) == (kind("a"), reached.times)
        assert ("worst", 1) == (kind(Odd()), reached.times)


def test_the_names_of_code_stay() -> None:
    """A frame of changed code, and one nested in it, has the name, the file and the line it had."""
    right = names()

    with planted([Edit(f"{HERE}:names", "return [", 'return ["new", ')]):
        changed = names()
        assert fault_targets.__file__ == names.__code__.co_filename
    assert ["names", "names.<locals>.nested"] == right
    assert ["new", *right] == changed

    with planted([Edit(f"{HERE}:Shelf.room", "self.books", "self.boks")]):
        assert "Shelf.room" == Shelf.room.__code__.co_qualname
        with pytest.raises(AttributeError) as caught:
            Shelf().room()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert ("room", "return size - self.books") == (last.name, last.line)
    with planted([Swap(f"{HERE}:Shelf.room", lambda *_: 0)]):
        assert ("room", "Shelf.room") == (Shelf.room.__code__.co_name, Shelf.room.__code__.co_qualname)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ([Edit(TOTAL, "no such text", "x")], f"{TOTAL}: found 0 times, expected once: 'no such text'"),
        ([Edit(TOTAL, "result += value", "x")], "found 2 times, expected once"),
        ([Edit(TOTAL, "LIMIT", "x")], "found 2 times, expected once"),
        ([Edit("tests.no_such_module:f", "a", "b")], "No module named 'tests.no_such_module'"),
        ([Edit("tests.fault_targets", "a", "b")], "expected module:function or module:Class.method"),
        ([Edit(":total", "a", "b")], "expected module:function or module:Class.method"),
        ([Edit(f"{HERE}:totl", "a", "b")], "there is no 'totl'; did you mean 'total'?"),
        ([Edit(f"{HERE}:Shelf.rom", "a", "b")], "there is no 'rom'; did you mean 'room'?"),
        ([Edit(f"{HERE}:Shelf", "a", "b")], "is a type; expected a function"),
        ([Edit(f"{HERE}:number", "a", "b")], "is a int; expected a function"),
        ([Swap("builtins:len", lambda *_: 0)], "is a builtin_function_or_method; expected a function"),
        ([Edit(f"{HERE}:count_by_two", "value +", "value -")], "uses variables of an outer function"),
        ([Swap(f"{HERE}:Cupboard.room", lambda *_: 0)], "uses variables of an outer function"),
        ([Edit(f"{HERE}:double", "2", "3")], "is no `def`"),
        ([Edit(f"{HERE}:unwritten", "1", "2")], "its source cannot be read"),
        ([Edit(f"{HERE}:Shelf.__eq__", "1", "2")], "its source cannot be read"),
        ([Edit(TOTAL, "result = start", "result  =  start  # as it is")], "changes nothing"),
        ([Edit(f"{HERE}:squared", "@cache", "@staticmethod")], "changes nothing"),  # a decorator is not run again
        (
            [Edit(TOTAL, "result = start", "result = (start")],
            "the edit gives no Python: '(' was never closed: 'result = (start'",
        ),
        ([Edit(TOTAL, "for value in values:")], "the edit gives no Python"),
        ([Edit(TOTAL, "result += LIMIT", "yield from break")], "the edit gives no Python"),
        ([Edit(f"{HERE}:twice", "second = value", "break")], "SyntaxError: 'break' outside loop"),
        ([Edit(f"{HERE}:twice", "value: int,", "value=nothing,")], "NameError: name 'nothing' is not defined"),
        ([Edit(f"{HERE}:twice", "first + second", "first\nother = 2")], "more than one statement"),
        ([Edit(f"{HERE}:twice", inspect.getsource(twice), "pass")], "leaves no function"),
        ([Edit(TOTAL, "LIMIT:", "1:"), Swap(TOTAL, lambda *_: 0)], "1 edits and 1 swaps; expected edits alone, or one"),
        ([Swap(TOTAL, lambda *_: 0)] * 2, "0 edits and 2 swaps"),
        (
            [Edit(f"{HERE}:{name}.full", "==", "!=") for name in ("Shelf", "Cupboard")],
            "expected one target a function",
        ),
    ],
)
def test_what_cannot_be_planted_is_told(changes: list[Edit | Swap], part: str) -> None:
    """A text that is not there once, a target that is no function, an edit that is no edit: an error, never a fault."""
    with pytest.raises(FaultError, match=re.escape(part)), planted(changes):
        pytest.fail("planted")
    assert (False, 3, 4) == (Shelf().full, total([3]), twice(2))


def test_a_module_that_breaks_is_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that raises while it is imported is an error of the fault's target."""
    (tmp_path / "breaks_at_once.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(FaultError, match="target 'breaks_at_once:f': ZeroDivisionError: division by zero"):
        function_at("breaks_at_once:f")


def test_a_function_is_changed_once() -> None:
    """What is planted is not changed a second time, and stays as it is."""
    with planted([Edit(TOTAL, "return result", "return 0")]):
        with pytest.raises(FaultError, match=f"{TOTAL} is changed already"), planted([Swap(TOTAL, lambda *_: 1)]):
            pytest.fail("planted")
        assert 0 == total([3])
    assert 3 == total([3])


@pytest.mark.parametrize(
    ("made", "part"),
    [
        (fault(), "fault 'wrong.one' changes nothing; expected an Edit or a Swap"),
        (
            fault(Edit(TOTAL, "return"), level="rank"),
            "fault 'wrong.one': level 'rank'; expected one of component, request, both",
        ),
        (fault(Edit(TOTAL, "gone")), f"fault 'wrong.one': {TOTAL}: found 0 times"),
        (Variant("wrong.one", "It is right.", (Edit(TOTAL, "gone"),)), f"fault 'wrong.one': {TOTAL}: found 0 times"),
    ],
)
def test_a_check_names_the_fault(made: Fault | Variant, part: str) -> None:
    """Each is planted for a moment; the first that cannot be is named."""
    good = fault(Edit(TOTAL, "return result", "return 0"))

    check({"good": good})
    with pytest.raises(FaultError, match=re.escape(part)):
        check({"good": good, "bad": made})

    assert 3 == total([3])
    assert (2, 3) == (Cupboard(3).room(), Shelf().room())
