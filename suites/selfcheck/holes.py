"""Real faults that no case kills yet: each is a hole in the suites. They are planted in no run until one does."""

from __future__ import annotations

from harness.fault import Edit, Fault
from suites.selfcheck.faults.known_admission import DRAW_REFUSES, FITS

HOLES: tuple[Fault, ...] = (
    Fault(
        id="scratch.context-to-page-grid",
        does="The scratch holds contexts that are rounded up to the page size instead of N pages.",
        kind="admission",
        like="B57",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.scratch:ScratchSize.sized",
                old="group = placement.shards * ps",
                new="group = ps",
            ),
        ),
    ),
    Fault(
        id="sender.old-abort-counts",
        does="An abort that comes late is taken for one of the room's newer use.",
        kind="transfer",
        like="B44",
        breaks=("I18", "I06"),
        changes=(
            Edit(
                "kvshard_ref.sender:KVSender.poll",
                old="if each.use == use]",
                new="if each.use[:2] == use[:2]]",
            ),
        ),
        level="both",
    ),
    Fault(
        id="decode.success-overrides-give-up",
        does="A room that was given up is complete after all when every rank says done, and nobody releases it again.",
        kind="transfer",
        like="B49",
        breaks=("I17", "I04"),
        changes=(
            Edit(
                "kvshard_ref.decode:Slot.state",
                old="if self.why:",
                new='if self.why and (self.writers or any(each.kind != "done" for each in self.said.values())):',
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.lock-check-sums-classes",
        does="Whether a lock takes promised pages is checked over all classes together, not class by class.",
        kind="accounting",
        like="B08",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._check_promises",
                "if any(take > have for take, have in zip(taken, room, strict=True)):",
                "if sum(taken) > sum(room):",
            ),
        ),
    ),
    Fault(
        id="admission.one-page-per-request",
        does="What is promised is reserved as a number of pages, not one per owner class.",
        kind="admission",
        like="facts 10-2",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._place",
                old=FITS,
                new="""
budget = self.placement.shards * min(add(self.free, self.evictable)) - sum(self.promised)
if min(subtract(room, needs)) >= 0 or budget >= sum(needs):
""",
            ),
            DRAW_REFUSES,
        ),
        level="both",
    ),
    Fault(
        id="radix.full-host-stops-eviction",
        does="A leaf that finds no room on the host stays on the device, so a busy host keeps the device full.",
        kind="tiers",
        like="facts 10-24",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.evict",
                old="""
if not node.slots and spill:
    spill(node)
""",
                new="""
if not node.slots and spill and not spill(node):
    kept.append(node)
    continue
""",
            ),
            DRAW_REFUSES,
        ),
        level="both",
    ),
)
