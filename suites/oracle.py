"""The oracle: what every row must hold, computed from tokens alone. Shares no code with any engine.

The stamp of token i is a number of *(all tokens up to i, layer, component, generation)*: a row of another request,
position, layer, component or generation differs, and equal prefixes agree, as in a real cache. A generation ends when
a cache is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.types import Rows

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """A 64-bit permutation that spreads every input bit (splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Oracle:
    """Stamps per token and the prefixes that were computed, as a dict over tokens."""

    def __init__(self, layers: Mapping[str, int], page_size: int) -> None:
        """`layers` of each component."""
        self.generation = 0
        self._page_size = page_size
        self._salts = {
            component: tuple(_mix((index + 1) << 32 | layer + 1) for layer in range(count))
            for index, (component, count) in enumerate(layers.items())
        }
        self._states: dict[tuple[int, ...], list[int]] = {}
        self._computed: set[int] = set()  # states at page ends whose rows were written in this generation

    def rows(self, tokens: tuple[int, ...], start: int, end: int) -> Rows:
        """Stamps of tokens [start, end) of the chain, as [component][layer][token]."""
        states = self._chain(tokens)[start:end]
        return {
            component: tuple(tuple(_mix(state ^ salt) >> 1 for state in states) for salt in salts)
            for component, salts in self._salts.items()
        }

    def wrote(self, tokens: tuple[int, ...], end: int) -> None:
        """Rows of [0, end) exist now."""
        page = self._page_size
        self._computed.update(self._chain(tokens)[page - 1 : end : page])

    def computed(self, tokens: tuple[int, ...]) -> int:
        """Tokens of the longest whole-page prefix that was ever computed in this generation."""
        page = self._page_size
        pages = 0
        for state in self._chain(tokens)[page - 1 :: page]:
            if state not in self._computed:
                break
            pages += 1
        return pages * page

    def forget(self) -> None:
        """The cache was dropped: what is computed from now on has other stamps."""
        self.generation += 1
        self._states.clear()
        self._computed.clear()

    def owners_of(self, stamp: int) -> Iterator[str]:
        """Whose stamp this is, in words; for messages."""
        for tokens, states in self._states.items():
            for component, salts in self._salts.items():
                for layer, salt in enumerate(salts):
                    for position, state in enumerate(states):
                        if _mix(state ^ salt) >> 1 == stamp:
                            prompt = tokens[: position + 1]
                            yield f"{component} layer {layer} position {position} of the prompt {prompt}"

    def _chain(self, tokens: tuple[int, ...]) -> list[int]:
        known = self._states.get(tokens)
        if known is None:
            state, known = _mix(self.generation + 1), []
            for token in tokens:
                state = _mix(state ^ (token + 1))
                known.append(state)
            self._states[tokens] = known
        return known
