from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from ci.register import register_cpu_ci
from kvshard_ref.errors import MisuseError
from kvshard_ref.server.text import ByteTokenizer, StoppedText, TextStream, withheld
from tests.server_face_rig import EOS, FOLDER, tokenizer

register_cpu_ci(est_time=10, stage="commit")

TOKENS = st.lists(st.one_of(st.integers(0, 259), st.sampled_from("aé漢🙂".encode())), max_size=30)


@given(TOKENS)
@example([0xE6, EOS, 0xBC, 0xA2])
@example([0xE6, 0xBC, 0x61])
def test_a_stream_comes_to_what_the_package_decodes(tokens: list[int]) -> None:
    """Token by token or at once, with special tokens or without, the text is the one of the tokenizers package."""
    package = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    stream = TextStream(tokenizer(), special=False)
    expected = package.decode(tokens, skip_special_tokens=True)
    assert expected == "".join(map(stream.add, tokens)) + stream.end()
    assert expected == tokenizer().decode(tokens, special=False)


@given(st.text())
def test_a_stream_never_cuts_a_character(text: str) -> None:
    """After every token the text is whole characters of the text; a character comes with its last byte."""
    stream, said = TextStream(tokenizer()), ""
    tokens = tokenizer().encode(text)
    for count, token in enumerate(tokens, 1):
        said += stream.add(token)
        whole = bytes(tokens[:count]).decode(errors="ignore")
        assert whole == said
    assert ("", text) == (stream.end(), said)


def test_bytes_and_names() -> None:
    """Bytes for all 256 tokens; names tell apart what is no whole character; special tokens are seen or not."""
    bytewise = tokenizer()
    assert [bytes([token]) for token in range(256)] == [bytewise.bytes_of(token) for token in range(256)]
    assert ["a", "\n", "bytes:\\xe4", "<|eos|>", ""] == [bytewise.name(token) for token in (97, 10, 0xE4, EOS, 300)]
    assert "a<|eos|>b" == bytewise.decode([97, EOS, 98])
    assert "ab" == bytewise.decode([97, EOS, 98, 300], special=False)


def test_an_added_token_that_is_not_special_is_text() -> None:
    """It stays when special tokens are left out, with its own characters and not those of the byte alphabet."""
    package = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    package.add_tokens(["漢 x"])
    bytewise = ByteTokenizer(package)
    assert [97, 260] == bytewise.encode("a漢 x")
    assert "a漢 x" == bytewise.decode([97, 260], special=False)


def test_a_tokenizer_of_words_is_refused() -> None:
    """Only byte-level tokenizers: of others a token's bytes are not known."""
    words = Tokenizer(models.WordLevel({"▁hello": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(MisuseError, match="token 0 of the tokenizer is '▁hello', expected a byte-level tokenizer"):
        ByteTokenizer(words)


STOPS = st.lists(st.text("ab;é", min_size=1, max_size=3), max_size=3)


@given(st.text("ab;é", max_size=20), STOPS, st.booleans())
@example("ab;", ["b;", "ab;"], False)
@example("aab", ["ab"], False)
def test_stop_strings_against_a_search(text: str, stops: list[str], keep_stop: bool) -> None:  # noqa: FBT001  # drawn
    """The text ends at the first stop string to be complete; what is certain on the way never has to be taken back."""
    stopped = StoppedText(tokenizer(), stops, keep_stop=keep_stop)
    certain = []
    for token in tokenizer().encode(text):
        stopped.add(token)
        certain.append(stopped.certain)
        if stopped.stopped_by:
            break
    else:
        stopped.end()
    prefixes = [text[:length] for length in range(len(text) + 1)]
    first = next((prefix for prefix in prefixes if any(stop in prefix for stop in stops)), None)
    if first is None:
        expected, by = text, ""
    else:
        at, _, by = min((first.index(stop), -len(stop), stop) for stop in stops if stop in first)
        expected = first[: at + (len(by) if keep_stop else 0)]
    assert (expected, by) == (stopped.certain, stopped.stopped_by)
    assert all(expected.startswith(each) for each in certain)


def test_as_little_as_needed_is_withheld() -> None:
    """Only an end that begins a stop string waits, the longest one."""
    examples = {"xa": 1, "xab": 2, "xaba": 1, "x": 0, "": 0}
    assert examples == {text: withheld(text, ["abc", "a-"]) for text in examples}
