r"""Texts of facts, for models that find them: `abc=value; ` in the context, asked as `?abc=` on a new line.

One fact a page::

    page 0                 page 1                 page 2 ...            question about page 1
    abc=wxyz; bado ki ..   def=klmno; gomi ..     ghi=pqrs; vuze ..     \n?def=        klmno;
"""

from __future__ import annotations

import random
from typing import NamedTuple

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
FACT_MAX = 12  # tokens of the longest fact


class Fact(NamedTuple):
    """What one page says."""

    page: int
    question: str
    answer: str
    """Up to and with its `;`."""


def context(rng: random.Random, tokens: int, page_size: int) -> tuple[str, list[Fact]]:
    """Text of whole pages, at most so many bytes, and its facts: one a page, or one for a few small pages."""
    text, facts = "", []
    step = -(-FACT_MAX // page_size) * page_size
    for at, key in enumerate(rng.sample(range(len(LETTERS) ** 3), tokens // step)):
        name = "".join(LETTERS[key // len(LETTERS) ** place % len(LETTERS)] for place in range(3))
        value = "".join(rng.choices(LETTERS, k=rng.randint(4, 6)))
        text += (f"{name}={value}; {filler(rng, step)}")[: step - 1] + " "
        facts.append(Fact(at * step // page_size, f"\n?{name}=", f"{value};"))
    return text, facts


def filler(rng: random.Random, count: int) -> str:
    """At least so many characters of made-up words."""
    words = ""
    while len(words) < count:
        words += "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) + " "
    return words
