"""Text of tokens and back, through a byte-level tokenizer: every token stands for some bytes, special ones for none."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from kvshard_ref.errors import MisuseError


class ByteTokenizer:
    """A byte-level tokenizer in Hugging Face format, with the bytes of each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises MisuseError for one that is not byte-level."""
        self._tokenizer = tokenizer
        added = {token: each.content for token, each in tokenizer.get_added_tokens_decoder().items()}
        self.special = frozenset(token for token, each in tokenizer.get_added_tokens_decoder().items() if each.special)
        alphabet = byte_alphabet()
        self._bytes: list[bytes] = []
        for token in range(tokenizer.get_vocab_size()):
            name = tokenizer.id_to_token(token) or ""  # ids may have gaps
            try:
                self._bytes.append(added[token].encode() if token in added else bytes(alphabet[each] for each in name))
            except KeyError as error:
                raise MisuseError(
                    f"token {token} of the tokenizer is {name!r}, expected a byte-level tokenizer, in which every "
                    f"character stands for a byte; {error} does not"
                ) from error

    @classmethod
    def load(cls, folder: Path) -> ByteTokenizer:
        """From tokenizer.json in a model's folder."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; names of special tokens become those tokens."""
        return self._tokenizer.encode(text).ids

    def bytes_of(self, token: int, *, special: bool = True) -> bytes:
        """A token's bytes; none for one beyond the vocabulary (models pad theirs), or for a special one if so asked."""
        unseen = token >= len(self._bytes) or (token in self.special and not special)
        return b"" if unseen else self._bytes[token]

    def decode(self, tokens: Iterable[int], *, special: bool = True) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.bytes_of(token, special=special) for token in tokens).decode(errors="replace")

    def name(self, token: int) -> str:
        r"""Text of one token that tells it from others: its characters, or `bytes:\xe4` where they are not whole."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextStream:
    """Text of tokens that come one by one. A character appears once all of its bytes are there."""

    def __init__(self, tokenizer: ByteTokenizer, *, special: bool = True) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """What the token adds."""
        return self._decoder.decode(self._tokenizer.bytes_of(token, special=self._special))

    def end(self) -> str:
        """What the bytes that were held back come to: nothing, or U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StoppedText:
    """Text of tokens that ends before the first stop string, wherever the tokens' borders are."""

    def __init__(
        self, tokenizer: ByteTokenizer, stops: Sequence[str], *, keep_stop: bool = False, special: bool = False
    ) -> None:
        """The stop string itself is cut too, unless `keep_stop`; special tokens are seen if `special`."""
        self.stopped_by = ""
        self._stops, self._keep_stop = stops, keep_stop
        self._stream = TextStream(tokenizer, special=special)
        self._text, self._ended = "", False

    @property
    def certain(self) -> str:
        """The text, until the end without what may turn out to be the beginning of a stop string."""
        unsure = 0 if self.stopped_by or self._ended else withheld(self._text, self._stops)
        return self._text[: len(self._text) - unsure]

    def add(self, token: int) -> None:
        """One more token; of the stop strings that it completes, the one that begins first counts."""
        fresh = len(self._text)
        self._text += self._stream.add(token)
        starts = [(self._text.find(stop, max(0, fresh - len(stop) + 1)), -len(stop), stop) for stop in self._stops]
        found = [each for each in starts if each[0] >= 0]
        if found:
            at, _, self.stopped_by = min(found)
            self._text = self._text[: at + (len(self.stopped_by) if self._keep_stop else 0)]

    def end(self) -> None:
        """No more tokens come: all that was held back is text."""
        self._text += self._stream.end()
        self._ended = True


def withheld(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: printable Latin-1, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
