"""One rank of the real sglang components behind the contract's values: ops in, replies and views out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness import types as t
from harness import views as v
from harness.adapter import EngineFault, OpSession
from harness.adapters.sglang_batch import Chunk, ExtendBatch, adder_of, admit, in_turn
from harness.adapters.sglang_core import Core
from harness.adapters.sglang_held import Held
from harness.adapters.sglang_install import Parts
from harness.adapters.sglang_pools import Model
from harness.adapters.sglang_sends import Sends
from harness.adapters.sglang_stage import Place
from harness.adapters.sglang_views import rank_view, tokens_in_tree
from kvshard_ref.errors import RefusedError

CAN_ALLOCATE = "What the admission accepts can be allocated."


@dataclass(frozen=True, slots=True)
class Options:
    """How the components are made."""

    attention: str = "mha"
    tree: str = "python"


class SglangRank(OpSession):
    """One rank. All ranks of a session run the same ops, each in its own thread."""

    def __init__(self, parts: Parts, config: t.Config, options: Options, place: Place) -> None:
        self._parts = parts
        self._config = config
        self._options = options
        self._place = place
        self._core = self._started()
        self._sends = self._sending()
        self._live: dict[str, Held] = {}
        self._leaving: dict[str, tuple[Held, bool]] = {}  # ended, on their way to a room; whether it is kept

    def _sending(self) -> Sends | None:
        if not self._config.decode_pages:
            return None
        return Sends(self._parts, self._core, self._config, self._options.attention, self._place)

    def _started(self) -> Core:
        with self._place.devices.of(self._place.device):
            return Core(
                self._parts,
                self._config,
                attention=self._options.attention,
                tree=self._options.tree,
                place=self._place,
            )

    def apply(self, op: t.AnyOp) -> t.AnyReply:
        """Carry out one op on this rank; `Extended.reads` holds this rank's reads alone."""
        self._place.group.log.clear()
        with self._place.devices.of(self._place.device):
            if not isinstance(op, t.Locate):  # which is pure
                self._core.turn()
            reply = super().apply(op)
            if not isinstance(op, t.Locate):
                self._take_sent()
            return reply

    def _take_sent(self) -> None:
        """Transfers move on; what a transfer has kept of a request that has ended is released."""
        for name in self._sends.poll() if self._sends else ():
            if name in self._leaving:
                held, checkpoint = self._leaving.pop(name)
                self._end(held, checkpoint=checkpoint)

    def view(self) -> v.RankView:
        """Everything that this rank can show."""
        leaving = {name: held for name, (held, _) in self._leaving.items()}
        rooms, sent = (self._sends.rooms, self._sends.sent_bytes) if self._sends else ({}, 0)
        return rank_view(self._parts, self._core, self._live | leaving, self._place.group, rooms, sent)

    def close(self) -> None:
        """Give back what would outlive the session."""
        if self._sends:
            self._sends.lose()
        self._core.close()

    # ---- requests

    def do_open(self, op: t.Open) -> t.AnyReply:
        most = self._core.prompt_tokens_max
        if op.request in self._live or op.request in self._leaving:
            return t.Refused(f"request {op.request!r} lives already")
        if not 1 <= len(op.tokens) <= most:
            return t.Refused(f"a prompt of {len(op.tokens)} tokens; expected 1 to {most}")
        if wanted := self._wanted_by(op.tokens):
            return t.Refused(
                f"its prefix is not held by anybody, and {wanted!r}, between its chunks, may need the room; sglang "
                "locks nothing for a request that waits"
            )
        req = self._parts.Req(
            rid=op.request,
            origin_input_text="",
            origin_input_ids=array("q", op.tokens),
            sampling_params=self._parts.SamplingParams(max_new_tokens=1),  # as on every prefill worker
        )
        req.init_next_round_input(self._core.tree)
        host = self._core.host
        from_host = req.host_hit_length if host and req.host_hit_length >= host.threshold else 0
        held = Held(req, len(op.tokens), req.prefix_len + from_host, from_host)
        # sglang matches anew at each attempt and locks at admission; here the match is told, so it is locked at once
        self._core.lock(held)
        self._live[op.request] = held
        return t.Ok(t.Opened(held.cached, from_host))

    def _wanted_by(self, tokens: Sequence[int]) -> str | None:
        """The request between its chunks that a lock on the prefix of these tokens would take evictable pages from."""
        waiting = self._half_done()
        if waiting is None or not self._core.would_lock(tokens):
            return None
        return str(waiting.req.rid)

    def _half_done(self) -> Held | None:
        return next((held for held in self._live.values() if held.half_done), None)

    def do_finish(self, op: t.Finish) -> t.AnyReply:
        held = self._live.pop(op.request, None)
        if held is None:
            return _unknown(op.request)
        held.req.finished_reason = self._parts.FinishLength(length=0)
        self._leave(op.request, held, checkpoint=True)
        return t.Ok(t.Finished(int(held.req.kv.cache_protected_len) if held.admitted else held.cached))

    def do_abort(self, op: t.Abort) -> t.AnyReply:
        held = self._live.pop(op.request, None)
        if held is None:
            return _unknown(op.request)
        self._leave(op.request, held, checkpoint=False)
        return t.Ok(t.Done())

    def _leave(self, name: str, held: Held, *, checkpoint: bool) -> None:
        """It ends now, or when its transfer has ended."""
        if self._sends and self._sends.leave(name, aborted=not checkpoint):
            self._leaving[name] = (held, checkpoint)
        else:
            self._end(held, checkpoint=checkpoint)

    def _end(self, held: Held, *, checkpoint: bool) -> None:
        self._place.forwards.land(held.forward)  # it ends when the result of its last forward is there
        if held.admitted:
            self._parts.release(held.req, self._core.tree, checkpoint=checkpoint)
        else:
            self._core.unlock(held)

    # ---- chunks

    def do_extend(self, op: t.Extend) -> t.AnyReply:
        return self._batch([op])[0]

    def do_together(self, op: t.Together) -> t.AnyReply:
        chunks = [one for one in op.ops if isinstance(one, t.Extend)]
        if len(chunks) < len(op.ops):
            return t.Refused("a worker runs only chunks together; expected nothing but extend ops")
        return t.Replies(tuple(self._batch(chunks)))

    def _batch(self, ops: Sequence[t.Extend]) -> list[t.AnyReply]:
        refused: dict[int, str] = {}
        chunks: list[Chunk] = []
        for index, op in enumerate(ops):
            if wrong := self._wrong(op, chunks):
                refused[index] = wrong
            else:
                held = self._live[op.request]
                rows = self._place.codec.encode(op)
                chunks.append(Chunk(index, held, held.computed, held.computed + op.count, rows))
        going, late = in_turn(chunks, self._half_done())
        refused |= late
        while going:  # the adder may cut a chunk shorter than asked; then the rest is for the next pass
            going = self._admitted(going, refused)
            if going:
                self._compute(going)
            going = [chunk for chunk in going if chunk.left]
        replies: dict[int, t.AnyReply] = {index: t.Refused(why) for index, why in refused.items()}
        for chunk in chunks:
            if chunk.index not in replies and chunk.reads is not None:
                reads = (self._place.codec.decode(chunk.reads),)
                replies[chunk.index] = t.Ok(t.Extended(chunk.start, chunk.end, reads))
        return [replies[index] for index in range(len(ops))]

    def _wrong(self, op: t.Extend, chunks: Sequence[Chunk]) -> str | None:
        held = self._live.get(op.request)
        if held is None:
            return f"no request {op.request!r} lives"
        page, end = self._config.page_size, held.computed + op.count
        if any(chunk.held is held for chunk in chunks):
            return f"two chunks of {op.request!r} in one batch"
        if not 1 <= op.count <= held.left:
            return f"extend of {op.request!r} by {op.count} tokens; expected 1 to {held.left}"
        if end < held.tokens and end % page:
            return f"extend of {op.request!r} to token {end}; expected the prompt's end or a multiple of {page}"
        if -(-op.count // page) * page > self._core.spec.chunk_tokens:
            return f"a chunk of {op.count} tokens; a batch has at most {self._core.spec.chunk_tokens}, in whole pages"
        shape = {name: [len(stamps) for stamps in layers] for name, layers in op.rows.items()}
        expected = {name: [op.count] * t.layers_of(self._config, name) for name in self._config.components}
        return None if shape == expected else f"rows per component and layer are {shape}; expected {expected}"

    def _admitted(self, chunks: Sequence[Chunk], refused: dict[int, str]) -> list[Chunk]:
        """The chunks that one pass of the adder takes; of the others `refused` tells why."""
        adder, going = adder_of(self._parts, self._core), []
        for chunk in chunks:
            if why := admit(self._core, chunk, adder):
                refused[chunk.index] = why
            else:
                going.append(chunk)
        return going

    def _compute(self, chunks: Sequence[Chunk]) -> None:
        """One forward: allocate, plan and gather the prefixes, write and read every layer, publish."""
        core, parts = self._core, self._parts
        if core.host is not None:
            core.host.start_loading()
        reqs = [chunk.held.req for chunk in chunks]
        batch = ExtendBatch(reqs, core, self._place.at)
        try:
            locs, _, indices = parts.alloc_for_extend(batch)
        except RuntimeError as error:
            seen = f"{' '.join(str(error).split())} Free pages {core.allocator.class_free_page_counts()} per class."
            raise EngineFault(CAN_ALLOCATE, seen, "pages", "the adder accepted the batch") from error
        with self._place.forwards.launch():
            lengths = [req.extend_end for req in reqs]
            for model in core.models:
                model.rows.pool.begin_shard_extend(
                    core.table.req_to_token, indices.tolist(), batch.prefix_lens, batch.seq_lens_cpu.tolist()
                )
                reads = self._through_layers(model, chunks, locs)
                for name in model.names.values():
                    whole = torch.stack([read[name] for read in reads])
                    for chunk, read in zip(chunks, whole.split(lengths, dim=1), strict=True):
                        chunk.reads = {**(chunk.reads or {}), name: read}
        for chunk in chunks:
            chunk.held.forward = self._place.forwards.launched
        for req in reqs:
            parts.checkpoint(req, core.tree)
        if core.host is not None:
            core.host.flush()

    def _through_layers(
        self, model: Model, chunks: Sequence[Chunk], locs: torch.Tensor
    ) -> list[dict[str, torch.Tensor]]:
        """Write the batch's rows and read those of its whole prompts so far, layer by layer as a model does."""
        spans = []
        for chunk in chunks:
            at = chunk.held.computed - chunk.start
            spans.append((chunk.rows, slice(at, at + chunk.held.req.extend_len)))
        rows = {name: torch.cat([its[name][:, span] for its, span in spans], dim=1) for name in model.names.values()}
        table = self._core.table.req_to_token
        places = torch.cat(
            [
                model.rows.pool.translate_loc_to_scratch(table[req.kv.req_pool_idx, : req.extend_end])
                for req in (chunk.held.req for chunk in chunks)
            ]
        )
        reads = []
        for layer in range(model.layers):
            model.write(layer, locs, {name: its[layer] for name, its in rows.items()})
            reads.append(model.read(layer, places))
        return reads

    # ---- the cache

    def do_evict(self, op: t.Evict) -> t.AnyReply:
        tiers = ("device", "host") if self._core.host else ("device",)
        if op.tokens < 1 or op.tier not in tiers:
            return t.Refused(f"evict of {op.tokens} tokens from {op.tier!r}; expected at least 1 from {tiers}")
        if op.tier == "host":
            return t.Ok(t.Evicted(int(self._core.tree.evict_host(op.tokens))))
        result = self._core.tree.evict(self._parts.EvictParams(num_tokens=op.tokens))
        return t.Ok(t.Evicted(int(result.num_tokens_evicted)))

    def do_flush(self, op: t.Flush) -> t.AnyReply:
        if self._live or self._leaving:
            return t.Refused(f"requests live: {', '.join([*self._live, *self._leaving])}")
        if self._core.sees_nodes:
            cached = tokens_in_tree(self._core)
        else:  # the rust core shows none, and has no host tier
            cached = int(self._core.tree.evictable_size() + self._core.tree.protected_size())
        self._settle()  # the scheduler flushes only when it is fully idle
        self._core.clear()
        return t.Ok(t.Evicted(cached))

    def do_restart(self, op: t.Restart) -> t.AnyReply:
        self.close()
        self._place.forwards.drain()
        self._core = self._started()
        self._sends = self._sending()
        self._live.clear()
        self._leaving.clear()
        return t.Ok(t.Done())

    def do_settle(self, op: t.Settle) -> t.AnyReply:
        self._settle()
        if self._sends:
            self._place.forwards.drain()  # the copies that are under way to a decode worker
        return t.Ok(t.Done())

    def _settle(self) -> None:
        if self._core.host is not None:
            self._core.host.settle()

    # ---- transfers

    def do_send(self, op: t.Send) -> t.AnyReply:
        held = self._live.get(op.request)
        if held is None:
            return _unknown(op.request)
        if self._sends is None:
            return t.Refused("there is no decode worker; open the session with decode_pages")
        try:
            self._sends.send(held, op.room)
        except RefusedError as error:
            return t.Refused(str(error))
        return t.Ok(t.Done())

    def do_lose(self, op: t.Lose) -> t.AnyReply:
        if not 0 <= op.rank < self._config.shards:
            return t.Refused(f"lose rank {op.rank}; expected 0..{self._config.shards - 1}, or -1 for the decode worker")
        if op.rank == self._place.group.rank and self._sends:
            self._sends.lose()
        return t.Ok(t.Done())

    def do_locate(self, op: t.Locate) -> t.AnyReply:
        locs = torch.tensor(op.locs, dtype=torch.int64)
        owners = self._core.placement.owner_of(locs).tolist()
        rows = self._core.placement.local_index(locs).tolist()
        stride = self._core.rows.stride()
        places = tuple(t.Place(owner, row, row * stride) for owner, row in zip(owners, rows, strict=True))
        return t.Ok(t.Located(places, stride))


def _unknown(name: str) -> t.Refused:
    return t.Refused(f"no request {name!r} lives")
