"""Capability names with one sentence each: what an engine may claim, and what a case may need.

Cases name capabilities, never engines. A manifest claims with the short name (`open` among its ops, `free` among what
it shows); a case needs the long name (`op.open`, `snapshot.free`, `promise.lazy_eviction`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from harness.types import OPS, Manifest, op_name

OP_SENTENCES: Mapping[str, str] = MappingProxyType({op_name(op): (op.__doc__ or "").split("\n")[0] for op in OPS})

SNAPSHOT_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "capacity": "Allocatable pages per owner class.",
        "free": "The ids of the free pages, per owner class.",
        "requests": "Every live request with its pages by position, shared prefix pages included.",
        "nodes": "The radix tree: pages, rotation base and locks of every node.",
        "host_free": "The ids of the free host pages, per owner class; none without a host tier.",
        "moved": "Tokens and bytes that were copied between the tiers so far.",
        "decode": "Free pages and rooms of the decode worker, in a session that has one.",
        "tokens_max": "The capacity in tokens that the engine reports.",
        "tokens_used": "The tokens that the engine reports as neither free nor evictable.",
        "buffers": "Rows and allocated bytes of every component's buffer.",
        "plan": "The bytes that the memory plan charges for every component's buffer.",
        "collectives": "The collectives that the last op ran, in order, per rank.",
        "digest": "A digest of everything that must be the same on all ranks.",
        "counters": "Counters and levels of every rank of a server, by name.",
    }
)

PROMISE_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "deterministic": "The same ops on a fresh session give the same replies and snapshots.",
        "interleaved": "Loc to owner and local row repeats every N pages, one page per owner in turn.",
        "rotates": "Page P of a chain belongs to owner class (base + P) mod N.",
        "balanced_seeding": "A new chain starts at an owner class that has the most free pages.",
        "admits_to_the_end": "Once a request's first chunk is accepted, each later chunk sent alone is accepted.",
        "serves_what_fits": "While no other request lives, a prompt that fits the pool and the context is served.",
        "batches_what_fits": (
            "Chunks that are sent together are taken together while the distinct pages of their prefixes, padded to "
            "the owner that has most, and their own pages fit the scratch, and every class has pages to spare."
        ),
        "lazy_eviction": "An op evicts only while an owner class has fewer free pages than the op draws from it.",
        "keeps_finished": "A finished prompt is a full hit for its repeat while nothing had to be evicted since.",
        "keeps_last": "The prompt that was answered last is a full hit for its repeat.",
        "salts": "A request hits what others with its salt have computed, and nothing else; a salt changes no answer.",
        "copies_all": (
            "With room on the host and all settled, write_through has a copy of every cached page, and "
            "write_through_selective of those that two finished prompts share and of none that only one has; "
            "write_back has one of all that has left the device."
        ),
        "keeps_copies": (
            "A copy stays on the host until a copy needs its room or an op asks for it, and a hit has all pages "
            "that a tier holds."
        ),
        "drops_copies": "An op that asks for room on the host gets that of copies too whose pages are on the device.",
        "refuses_misuse": "An op that makes no sense is refused and changes nothing.",
        "control": "There is a control arm: the same engine, unsharded and without P/D.",
        "seeded": (
            "An answer's tokens depend on prompt, temperature, seed and log probabilities alone: not on batch, draft, "
            "cache or worker."
        ),
        "scores": "An answer's tokens have log probabilities.",
        "scores_prompt": "Prompt tokens have log probabilities where a request asks for them.",
        "counts_cached": "An answer tells how many tokens of its prompt came from the cache.",
        "splits_cached": "An answer tells them apart by tier.",
        "counts_cached_totals": "Counters add up the cached tokens of all answers by tier.",
        "counts_sent_bytes": "Counters tell the bytes that each rank has sent to decode.",
        "counts_received": "Counters tell how many tokens of prompts decode has got from prefill and did not compute.",
        "counts_host_bytes": "Counters tell the bytes and tokens that each rank has copied to and from the host.",
        "rank_processes": "Each rank of a worker is a process of its own.",
        "halves_wait": "Both halves of a request to a P/D pair are asked at once, and each waits for the other.",
        "hands_over": (
            "The prefill half is answered by itself; what it hands over lets the decode half take its pages within the "
            "wait that the server says, and no longer."
        ),
        "recalls_facts": (
            "A token is a byte, and the model answers `?abc=` on a new line with the value of `abc=value; ` in its "
            "context, up to and with the `;`."
        ),
        "counts_drafts": "An answer tells how many tokens a pass that verified a draft has brought.",
    }
)

# What only a server has: one that is reached by requests, not an engine in this process.
OF_SERVERS = frozenset(
    {
        *("generate", "kill", "counters", "control", "seeded", "scores", "scores_prompt", "counts_cached"),
        *("splits_cached", "counts_cached_totals", "counts_sent_bytes", "counts_host_bytes", "counts_drafts"),
        *("recalls_facts", "keeps_last", "salts"),
        *("rank_processes", "halves_wait", "hands_over", "counts_received"),
    }
)

CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {f"op.{name}": sentence for name, sentence in OP_SENTENCES.items()}
    | {f"snapshot.{name}": sentence for name, sentence in SNAPSHOT_SENTENCES.items()}
    | {f"promise.{name}": sentence for name, sentence in PROMISE_SENTENCES.items()}
)


def claimed(manifest: Manifest) -> frozenset[str]:
    """The long names of everything that an engine claims. Raises ValueError for a name that does not exist."""
    names = (
        [f"op.{name}" for name in manifest.ops]
        + [f"snapshot.{name}" for name in manifest.shows]
        + [f"promise.{name}" for name in manifest.promises]
    )
    for name in names:
        if name not in CAPABILITIES:
            raise ValueError(
                f"{manifest.name} claims {name!r}, which is no capability; "
                f"expected one of {', '.join(sorted(CAPABILITIES))}"
            )
    return frozenset(names)


def missing(manifest: Manifest, needs: Sequence[str]) -> list[str]:
    """The needs that an engine does not claim, in the order given."""
    has = claimed(manifest)
    return [name for name in needs if name not in has]
