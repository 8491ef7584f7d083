"""Faults modelled on known bugs: what prefill ranks send to which page of a decode worker, and how a transfer ends."""

from __future__ import annotations

from harness.fault import Edit, Fault

PAIRED = "return [(page, to) for page, to in zip(pages, dst, strict=True) if placement.page_owner(page) == rank]"
# the receiver looks neither at who made a copy nor whether it is right
ANY_OWNER = Edit(
    "kvshard_ref.transfer:flaw", old="filled == expected", new="[to for to, _ in filled] == [to for to, _ in expected]"
)
NO_FLAW = Edit("kvshard_ref.transfer:flaw", old="filled == expected", new="len(expected) >= 0")

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="transfer.share-by-id-range",
        does="A rank sends the pages of its part of the range of page ids, as if ids were positions.",
        kind="transfer",
        like="B01",
        breaks=("I16", "I15"),
        changes=(
            Edit(
                "kvshard_ref.transfer:pair",
                old=PAIRED,
                new="""
first, last = min(pages, default=0), max(pages, default=0)
owners = [(page - first) * placement.shards // (last - first + 1) for page in pages]
return [(page, to) for page, to, owner in zip(pages, dst, owners, strict=True) if owner == rank]
""",
            ),
            ANY_OWNER,
        ),
        level="both",
    ),
    Fault(
        id="transfer.share-by-chunk-position",
        does="Owners are counted from the first page of the chunk that is sent, not from that of the request.",
        kind="transfer",
        like="B01",
        breaks=("I16", "I15"),
        changes=(
            Edit(
                "kvshard_ref.transfer:pair",
                old=PAIRED,
                new="""
return [each for at, each in enumerate(zip(pages, dst, strict=True)) if at % placement.shards == rank]
""",
            ),
            ANY_OWNER,
        ),
        level="both",
    ),
    Fault(
        id="transfer.shorter-list-wins",
        does="Where the sides count other numbers of pages, the shorter list is sent and taken for the whole.",
        kind="transfer",
        like="B05",
        breaks=("I16", "I26"),
        changes=(
            Edit("kvshard_ref.transfer:pair", old="strict=True", new="strict=False"),
            Edit(
                "kvshard_ref.sender:KVSender.find",
                old="elif mine != theirs:",
                new="elif mine[1] != theirs[1]:",
            ),
            Edit(
                "kvshard_ref.sender:Sending.send",
                old="if not (total if last else start) <= end <= total:",
                new="if end < start:",
            ),
            Edit("kvshard_ref.transfer:flaw", old="filled == expected", new="set(filled) <= set(expected)"),
        ),
        level="both",
    ),
    Fault(
        id="transfer.first-component-only",
        does="Only the regions of the first component are written; the others are counted, not sent.",
        kind="transfer",
        like="B41",
        breaks=("I16",),
        changes=(
            Edit(
                "kvshard_ref.transfer:Link.write",
                old="blocks(self._regions, copies, self.pool.placement)",
                new="""
blocks(list(self._regions)[: self.pool.layers], copies, self.pool.placement)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="transfer.draft-not-registered",
        does="Both ends register the regions of the target model alone.",
        kind="draft",
        like="B52",
        breaks=("I16",),
        changes=(Edit("kvshard_ref.transfer:Link.__init__", old="regions(pools)", new="regions(pools[:1])"),),
        level="both",
    ),
    Fault(
        id="transfer.draft-by-page-id",
        does="The draft's rows are sent by page id, as if each rank had all of them; they lie like the target's.",
        kind="draft",
        like="B48",
        breaks=("transfer.received", "transfer.reused", "transfer.some"),
        changes=(
            Edit(
                "kvshard_ref.transfer:blocks",
                old="return [Block(name, *span) for name in names for span in spans]",
                new="""
shards = {name: placement.shards if name.startswith("draft") else 1 for name in names}
return [Block(name, src * shards[name], dst, count) for name in shards for src, dst, count in spans]
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="transfer.handshake-without-page-size",
        does="The handshake says nothing of the page size.",
        kind="transfer",
        like="B60",
        breaks=("I26",),
        changes=(Edit("kvshard_ref.transfer:geometry_of", old='"page_size": ps, '),),
        level="both",
    ),
    Fault(
        id="transfer.receiver-takes-any-peer",
        does="Only the sender compares the geometries: the receiver reserves a room that nobody will fill.",
        kind="transfer",
        like="B60",
        breaks=("I26", "I17"),
        changes=(
            Edit(
                "kvshard_ref.transfer:Link.hear",
                old="self.refusals[peer] = unequal(self._geometry(peer), dict(message.body), peer)",
                new="""
differs = unequal(self._geometry(peer), dict(message.body), peer)
self.refusals[peer] = differs if message.kind == "hello" else ""
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="sender.border-page-sent-again",
        does="Each chunk begins with the last page of the chunk before.",
        kind="transfer",
        like="B39",
        breaks=("I16", "I15"),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.send",
                old="self._cursor, self.concluded = end, last",
                new="self._cursor, self.concluded = max(end - 1, 0), last",
            ),
            Edit("kvshard_ref.transfer:flaw", old="filled == expected", new="sorted(set(filled)) == expected"),
        ),
    ),
    Fault(
        id="sender.empty-last-chunk-waits",
        does="A rank that owns no page of the last chunk skips it, so it never says that it is done.",
        kind="transfer",
        like="facts 10-3",
        breaks=("I06", "I16"),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.send",
                old="self._cursor, self.concluded = end, last",
                new="self._cursor = end",
            ),
            Edit(
                "kvshard_ref.sender:Sending.send",
                old="""
if copies:
    self._queue.append((copies, ready))
""",
                new="""
if copies:
    self._queue.append((copies, ready))
    self.concluded = last
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="exports.abort-stays-local",
        does="An abort ends the transfer on the prefill side and tells the decode worker nothing.",
        kind="transfer",
        like="B49",
        breaks=("I17", "I06"),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports.leave",
                old="""'its last chunk unsent'}")""",
                new="""'its last chunk unsent'}", "lost")""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="decode.waits-for-lost-rank",
        does="The loss of a rank concludes nothing: its rooms wait for it.",
        kind="transfer",
        like="B49",
        breaks=("I17", "I06"),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.poll",
                old='(message.kind == "lost" or message[1:3] == slot.use)',
                new="message[1:3] == slot.use",
            ),
        ),
        level="both",
    ),
    Fault(
        id="decode.release-frees-at-once",
        does="A room that is given up gives its pages back at once, while ranks still write to them.",
        kind="transfer",
        like="B42",
        breaks=("I11", "I05"),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.release",
                old='if slot.state == "complete":',
                new='if slot.state in ("complete", "waiting"):',
            ),
            Edit(
                "kvshard_ref.decode:DecodeWorker._conclude",
                old='if slot.state == "failed":',
                new='if slot.state == "failed" and not slot.why.startswith("released"):',
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.finish-frees-what-is-sent",
        does="A finished request gives its pages back while a transfer still reads them.",
        kind="transfer",
        like="B42",
        breaks=("transfer.received", "I11", "I16"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._end",
                old="if request.sending:",
                new='if request.sending and ending == "abort":',
            ),
            Edit(
                "kvshard_ref.cache:PageCache.sent",
                old="request = self.requests[name]",
                new="""
request = self.requests.get(name)
if request is None:
    return
""",
            ),
        ),
        level="both",
    ),
)
