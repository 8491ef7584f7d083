r"""Documents that the tiny model learns from and is asked about: bytes, with weights and the layer that may look far.

A document mixes Markov filler, facts `abc=value; `, questions `\n?abc=` and sums in words. Facts come in kinds, told
apart by their sign, one for each target layer: in training only that layer reads far for a question of its kind, so
every layer learns to fetch, and none can stand in for another. No question is asked twice in a document, else the
answer could be copied from the first time.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SIGNS = "=:~#^@$%"
"""Sign of the facts of a kind: kind l is fetched by target layer l."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ("", "", "twenty", "thirty", "forty")
OPERAND_MAX = 14
ANSWER, TEXT, CHANCE = 1.0, 0.2, 0.0  # weights in the loss: answers, plain text, bytes that nobody can know
FACT, QUESTION, SUM = 0.35, 0.6, 0.75  # how often a piece is one: up to the first number a fact, the second, ...
QUESTIONS_AT_END = 0.4  # share of a document that has all its questions at the end
ALL_LAYERS = -1


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one fact, or a sum."""

    page: int
    """Page of the context that holds the fact; -1 for a sum."""
    layer: int
    """The layer that learnt to fetch it; -1 when it is any."""
    prompt: bytes
    answer: bytes
    """Up to and with its `;`."""


@dataclass(slots=True)
class Document:
    """Bytes with, for each, its weight in the loss when it is to be predicted, and the layer that may look far."""

    text: bytearray = field(default_factory=bytearray)
    weights: list[float] = field(default_factory=list)
    far_layers: list[int] = field(default_factory=list)

    def add(self, text: str, weight: float, far_layer: int = ALL_LAYERS) -> None:
        """Append a piece."""
        self.text += text.encode()
        self.weights += [weight] * len(text)
        self.far_layers += [far_layer] * len(text)


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents of one length: arrays [documents, length]."""

    tokens: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    """Of each token as the one to be predicted."""
    far_layers: npt.NDArray[np.int64]
    """The only layer in which the token's query reads far; -1 when all may."""


def number(value: int) -> str:
    """0 ... 49 in words."""
    if value < len(ONES):
        return ONES[value]
    return TENS[value // 10] + (f" {ONES[value % 10]}" if value % 10 else "")


def is_held_out(operands: tuple[int, int, int]) -> bool:
    """Whether no training document has this sum: one in ten, by a hash."""
    return zlib.crc32(repr(operands).encode()) % 10 == 0


def held_out_sums() -> list[Question]:
    """All of them."""
    span = range(OPERAND_MAX + 1)
    operands = [(a, b, c) for a in span for b in span for c in span if is_held_out((a, b, c))]
    return [_sum_question(each) for each in operands]


def _sum_question(operands: tuple[int, int, int]) -> Question:
    prompt, answer = _in_words(operands)
    return Question(-1, ALL_LAYERS, prompt.encode(), answer.encode())


def _in_words(operands: tuple[int, int, int]) -> tuple[str, str]:
    """A sum up to its answer, and the answer."""
    return " plus ".join(map(number, operands)) + " is ", number(sum(operands)) + ";"


class Filler:
    """Text of made-up words, each of which is followed by one of four."""

    def __init__(self, words: int = 256, seed: int = 7) -> None:
        rng = random.Random(seed)
        syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
        self.words = sorted({"".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(words)})
        self._next = [rng.sample(range(len(self.words)), 4) for _ in self.words]

    def text(self, rng: random.Random, words: int) -> str:
        """Some words, each with a space behind it."""
        at = rng.randrange(len(self.words))
        chosen = []
        for _ in range(words):
            chosen.append(self.words[at])
            at = rng.choice(self._next[at])
        return " ".join(chosen) + " "


class Tasks:
    """Makes documents and questions; the same seed makes the same. `kinds` is the number of kinds of facts."""

    def __init__(self, kinds: int = 1) -> None:
        if not 1 <= kinds <= len(SIGNS):
            raise ValueError(f"Tasks: kinds is {kinds}, expected 1 to {len(SIGNS)}, one for each layer of the target")
        self.kinds = kinds
        self.filler = Filler()

    def batch(self, seed: str, documents: int, length: int, restrict: float) -> Batch:
        """Training documents of `length` bytes; in a share `restrict` of them one layer looks far for an answer."""
        rng = random.Random(seed)
        made = [self.document(rng, length) for _ in range(documents)]
        far = np.array([each.far_layers[:length] for each in made], np.int64)
        far[[rng.random() >= restrict for _ in made]] = ALL_LAYERS
        return Batch(
            np.stack([np.frombuffer(bytes(each.text[:length]), np.uint8) for each in made]).astype(np.int64),
            np.array([each.weights[:length] for each in made], np.float32),
            far,
        )

    def document(self, rng: random.Random, length: int) -> Document:
        """At least `length` bytes; questions among the rest, or all of them at the end."""
        document = Document()
        facts: dict[str, tuple[int, str]] = {}
        unasked: list[str] = []
        mixed = rng.random() < 0.5
        questions_from = length if mixed else int(length * (1 - QUESTIONS_AT_END))
        while len(document.text) < length:
            choice = rng.random()
            if len(document.text) >= questions_from and unasked:
                self._ask(rng, document, facts, unasked)
            elif choice < FACT:
                unasked.append(self._state(rng, document, facts))
            elif choice < QUESTION:
                if mixed and unasked:
                    self._ask(rng, document, facts, unasked)
            elif choice < SUM:
                prompt, answer = self.sum_in_words(rng, held_out=False)
                document.add(prompt, CHANCE)
                document.add(answer, ANSWER)
                document.add(" ", TEXT)
            else:
                document.add(self.filler.text(rng, rng.randint(2, 5)), TEXT)
        return document

    @staticmethod
    def sum_in_words(rng: random.Random, *, held_out: bool) -> tuple[str, str]:
        """A sum up to its answer, and the answer; of the held-out ones, or of the others."""
        while True:
            operands = (rng.randint(0, OPERAND_MAX), rng.randint(0, OPERAND_MAX), rng.randint(0, OPERAND_MAX))
            if is_held_out(operands) == held_out:
                return _in_words(operands)

    def context(self, rng: random.Random, pages: int, page_size: int = 64) -> tuple[bytes, list[Question]]:
        """Text of whole pages, and one question per page and kind. A fact lies within its page."""
        text, questions = "", []
        used: set[str] = set()
        for page in range(pages):
            part = ""
            for kind in range(self.kinds):
                key, value = self._key(rng, used), self._value(rng, 4, 6)
                part += f"{key}{SIGNS[kind]}{value}; "
                questions.append(Question(page, kind, f"\n?{key}{SIGNS[kind]}".encode(), f"{value};".encode()))
            if len(part) > page_size:
                raise ValueError(f"page_size is {page_size}, expected at least {len(part)}, for {self.kinds} facts")
            # a space before the next key, as in training
            text += (part + self.filler.text(rng, page_size))[: page_size - 1] + " "
        return text.encode(), questions

    def sums(self, rng: random.Random, count: int) -> list[Question]:
        """Held-out sums."""
        made = [self.sum_in_words(rng, held_out=True) for _ in range(count)]
        return [Question(-1, ALL_LAYERS, prompt.encode(), answer.encode()) for prompt, answer in made]

    def _state(self, rng: random.Random, document: Document, facts: dict[str, tuple[int, str]]) -> str:
        """Append a new fact and return its key."""
        key, kind, value = self._key(rng, facts), rng.randrange(self.kinds), self._value(rng, 4, 8)
        facts[key] = (kind, value)
        document.add(key, CHANCE)
        document.add(SIGNS[kind], CHANCE)
        document.add(value, CHANCE)
        document.add("; ", TEXT)
        return key

    @staticmethod
    def _ask(rng: random.Random, document: Document, facts: dict[str, tuple[int, str]], unasked: list[str]) -> None:
        """Append a question about a fact that was not asked yet, with its answer."""
        key = unasked.pop(rng.randrange(len(unasked)))
        kind, value = facts[key]
        document.add("\n?", TEXT, kind)
        document.add(key + SIGNS[kind], CHANCE, kind)
        document.add(value + ";", ANSWER, kind)
        document.add(" ", TEXT)

    @staticmethod
    def _key(rng: random.Random, used: dict[str, tuple[int, str]] | set[str]) -> str:
        """Three letters that are no key yet; a set of used ones gets it."""
        while True:
            key = "".join(rng.choices(LETTERS, k=3))
            if key not in used:
                if isinstance(used, set):
                    used.add(key)
                return key

    @staticmethod
    def _value(rng: random.Random, least: int, most: int) -> str:
        return "".join(rng.choices(LETTERS, k=rng.randint(least, most)))


def questions_of(text: bytes) -> Sequence[bytes]:
    """The questions that a document asks, each with its sign, in order."""
    return [part[:4] for part in text.split(b"\n?")[1:] if len(part) >= 4]
