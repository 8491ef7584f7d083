"""A tiny model of random weights as GGUF: `python -m ci.llamacpp_model FOLDER`; needs the packages numpy and gguf.

Writes FOLDER/tiny.gguf and prints its path: a llama of 4 layers in float32, the same bytes each time. Every token is a
whole text: an ASCII character, or two letters in place of a byte from 128 on. With `--bytes` those are single bytes, no
text alone, which docs/findings/llama.cpp-bytes-without-scores.md is about. It finds no facts; answers differ
wherever a row of its cache does, which is what the cases want of a model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found,unused-ignore]  # of an environment of its own
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 4, 128, 4, 2, 32, 256
CONTEXT = 8192
CONTROLS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>")
SPREAD = 0.1  # standard deviation of the weights: less, and every answer is the same
SEED = 20
NAME = "tiny.gguf"


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def add_tokenizer(writer: Any, *, has_bytes: bool) -> None:
    """256 tokens, then the controls; a model without any merge is refused, so two blanks are one."""
    words, pairs = byte_letters(), [one + other for one in "abcdefgh" for other in "abcdefghijklmnop"]
    words = [*words[:128], *(words[128:] if has_bytes else pairs), "ĠĠ", *CONTROLS]
    kinds = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * len(CONTROLS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)


def add_weights(writer: Any) -> None:
    """All tensors, seeded."""
    draws = np.random.default_rng(SEED)

    def add(name: str, *shape: int) -> None:
        ones = name.endswith("norm.weight")
        values = np.ones(shape) if ones else draws.normal(0.0, SPREAD, shape)
        writer.add_tensor(name, values.astype(np.float32))

    vocabulary = 257 + len(CONTROLS)
    add("token_embd.weight", vocabulary, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", HIDDEN)
        add(block + "attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        add(block + "attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        add(block + "attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        add(block + "attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        add(block + "ffn_norm.weight", HIDDEN)
        add(block + "ffn_gate.weight", FEED_FORWARD, HIDDEN)
        add(block + "ffn_up.weight", FEED_FORWARD, HIDDEN)
        add(block + "ffn_down.weight", HIDDEN, FEED_FORWARD)
    add("output_norm.weight", HIDDEN)
    add("output.weight", vocabulary, HIDDEN)


def write(path: Path, *, has_bytes: bool) -> None:
    """The whole file."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(257 + len(CONTROLS))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_tokenizer(writer, has_bytes=has_bytes)
    add_weights(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--bytes", action="store_true", dest="has_bytes", help="tokens from 128 on are single bytes")
    args = parser.parse_args(arguments)
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / NAME, has_bytes=args.has_bytes)
    print(folder / NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
