"""A tiny model of random weights for vLLM: `python -m ci.vllm_model FOLDER`; needs the packages torch and transformers.

Writes FOLDER as a Hugging Face model and prints its path: a llama of 4 layers in float32 whose tokens are the 256 bytes
and a few controls, the same weights each time. It finds no facts; answers differ wherever a row of its cache does, as
the cases want it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (  # type: ignore[import-not-found,unused-ignore]  # of an environment of its own
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 4, 128, 4, 2, 32, 256
CONTEXT = 8192
CONTROLS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>")
SPREAD = 0.1  # standard deviation of the weights: less, and every answer is the same
SEED = 20
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, then the controls."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(CONTROLS))
    bos, eos = CONTROLS[:2]
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=bos, eos_token=eos, chat_template=TEMPLATE)


def model(words: int) -> LlamaForCausalLM:
    """All weights, seeded."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        initializer_range=SPREAD,
        bos_token_id=words - len(CONTROLS),
        eos_token_id=words - len(CONTROLS) + 1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder: Path = parser.parse_args(arguments).folder
    words = tokenizer()
    words.save_pretrained(folder)
    model(len(words)).save_pretrained(folder)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
