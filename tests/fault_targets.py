"""Functions of every kind, for the tests that plant faults."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

LIMIT = 10


def total(values: list[int], *, start: int = 0, step: int = 1) -> int:
    """Adds them up."""
    result = start
    for value in values:
        if value > LIMIT:
            result += LIMIT
        elif value < 0:
            # a debt counts twice
            result += value
            result += value
        else:
            result += step * value
    return result


def kind(value: object) -> str:
    try:
        match value:
            case int():
                name = "number"
            case str():
                name = "text"
                len(value)
            case _:
                name = str(value)
    except ValueError:
        name = "bad"
    except TypeError:
        name = "worse"
    return name


def names() -> list[str]:
    """The qualified names of its own frame and of one nested in it."""

    def nested() -> str:
        return sys._getframe().f_code.co_qualname

    return [sys._getframe().f_code.co_qualname, nested()]


def twice(
    value: int,
) -> int:
    first = value
    second = value
    return first + second


@cache
def squared(value: int) -> int:
    return value * value


@contextmanager
def opened(what: list[str]) -> Iterator[str]:
    what.append("open")
    yield "it"
    what.append("closed")


def counter(by: int) -> Callable[[int], int]:
    def count(value: int) -> int:
        return value + by

    return count


count_by_two = counter(2)
double = lambda value: value * 2  # noqa: E731  # a function without a `def`
exec("def unwritten(): return 1", globals())  # noqa: S102  # a function without a source
number = 7


@dataclass
class Shelf:
    SIZE = 3
    books: int = 0

    def room(self, size: int = SIZE) -> int:
        return size - self.books

    @property
    def full(self) -> bool:
        return self.books == self.SIZE

    @classmethod
    def of(cls, books: int) -> Shelf:
        return cls(books)

    @staticmethod
    def weight(books: int) -> int:
        return books * 2

    def put(self, *titles: str, spare: bool = False, **marks: int) -> tuple[object, ...]:
        self.books += len(titles)
        return titles, spare, marks


class Cupboard(Shelf):
    def room(self, size: int = 5) -> int:
        return super().room(size)
