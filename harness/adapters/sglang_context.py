"""Configurations of sglang for one session each, which never become that of the process; see its `use_context`."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.adapters.sglang_install import Parts, quiet

# The smallest model that its configuration accepts; no weights are loaded.
MODEL: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
)


class Contexts:
    """Makes them. What follows from the same settings is worked out once: that takes as long as a dozen ops.

    sglang hands arguments whose consequences it has worked out to child processes as a pickle; so does this to
    sessions, and none sees what another changes.
    """

    def __init__(self, loaded: Parts) -> None:
        self.loaded = loaded
        self._resolved: dict[tuple[tuple[str, object], ...], bytes] = {}

    def new(self, **settings: object) -> Any:
        """A configuration with these server arguments, of hashable values."""
        key = tuple(sorted(settings.items()))
        with quiet():
            if key not in self._resolved:
                self._resolved[key] = self._pickled(settings)
            arguments = pickle.loads(self._resolved[key])  # noqa: S301  # of this process
            return self.loaded.create_context(arguments, role="scheduler")

    def _pickled(self, settings: Mapping[str, object]) -> bytes:
        with tempfile.TemporaryDirectory(prefix="kvshard-") as folder:
            Path(folder, "config.json").write_text(json.dumps(dict(MODEL)), encoding="utf-8")
            arguments = self.loaded.ServerArgs(
                model_path=folder,
                device="cpu",
                skip_tokenizer_init=True,
                attention_backend="torch_native",  # makes it write rows of the token table by torch and not by triton
                disable_cuda_graph=True,
                **settings,
            )
            arguments.resolve_once()
        return pickle.dumps(arguments)
