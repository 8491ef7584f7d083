"""Where a loc lives: owner, local row, offset."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Config, Locate, Located, Ok, Place
from suites.claim import Step, case, expect, require
from suites.configs import configs, sharded
from suites.machine import machine
from suites.prompts import pool_pages

register_cpu_ci(est_time=10, stage="cases")


def period(config: Config) -> int:
    """Tokens of one page on every owner."""
    return config.page_size * (config.shards if config.layout == "sharded" else 1)


def located(step: Step) -> list[tuple[int, Place]]:
    """Every loc that the step asked for with its place."""
    return [
        (loc, place)
        for op, reply in step.parts()
        if isinstance(op, Locate) and isinstance(reply, Ok) and isinstance(reply.value, Located)
        for loc, place in zip(op.locs, reply.value.places, strict=True)
    ]


def whole_range(_: Draw, table: Table) -> None:
    """All locs of the pool, reserved pages included, in one look."""
    pages = pool_pages(table.config) + period(table.config) // table.config.page_size
    table.do(Locate(tuple(range(pages * table.config.page_size))))


def far_locs(draw: Draw, table: Table) -> None:
    """One period of locs at zero for reference, then locs around the limits of 32-bit arithmetic."""
    reply = table.do(Locate(tuple(range(period(table.config)))))
    if not isinstance(reply, Ok) or not isinstance(reply.value, Located):
        return
    stride = reply.value.row_bytes
    limits = [2**31, 2**32, 2**31 // stride, 2**32 // stride]
    limits += [limit * period(table.config) // table.config.page_size for limit in limits[2:]]
    limits += [limit * table.config.shards for limit in limits[:2]]  # there the row of one owner passes the limit
    near = draw(st.lists(st.integers(-2 * period(table.config), 2 * period(table.config)), min_size=1, max_size=4))
    table.do(Locate(tuple(max(0, limit + off) for limit in limits for off in near)))


@case(
    "placement.bijection",
    invariants=("I01",),
    needs=("op.locate",),
    seen={},
    plan=whole_range,
    configs=configs(),
    examples=0.3,
)
def test_bijection(step: Step) -> None:
    """Every loc has one owner and one local row, no two locs share one, and every rank has the same rows.

    A share computed from numeric ranges of page ids, or a buffer that ends before the last page (sglang#28718,
    sglang#36990).
    """
    config = step.config
    owners = config.shards if config.layout == "sharded" else 1
    places = located(step)
    rows = len(places) // owners
    expect(
        sorted((place.owner, place.row) for _, place in places),
        [(owner, row) for owner in range(owners) for row in range(rows)],
        f"(owner, row) of locs 0..{len(places) - 1}",
        "each owner keeps the same local rows, each row once",
    )


@case(
    "placement.pages_of_one_owner",
    invariants=("I01", "I15"),
    needs=("op.locate",),
    seen={},
    plan=whole_range,
    configs=sharded,
    examples=0.3,
)
def test_pages_of_one_owner(step: Step) -> None:
    """A page lies on one owner, its tokens in order on consecutive rows that start on the page grid of the owner.

    Ownership that changes inside a page, or a token permuted inside it: the page still holds the same bytes
    (sglang#31218).
    """
    page = step.config.page_size
    for loc, place in located(step):
        first = dict(located(step))[loc // page * page] if loc % page else place
        expect(
            (place.owner, place.row - first.row),
            (first.owner, loc % page),
            f"(owner, row in page) of loc {loc}",
            "pages stay whole",
        )
        expect(first.row % page, 0, f"row of loc {loc // page * page} modulo {page}", "pages start on the page grid")


@case(
    "placement.wide_offsets",
    invariants=("I02",),
    needs=("op.locate", "promise.interleaved"),
    seen={},
    plan=far_locs,
    configs=configs(),
    examples=0.5,
)
def test_wide_offsets(step: Step) -> None:
    """Owner, row and byte offset of a loc are those of exact integers, also beyond 2**31 and 2**32.

    Offsets computed in 32 bits: widening the loc space N times reaches the limit N times earlier (flashinfer#3136,
    sglang#34025).
    """
    config = step.config
    page, span = config.page_size, period(config)
    for op, reply in step.parts():
        if not (isinstance(op, Locate) and isinstance(reply, Ok) and isinstance(reply.value, Located)):
            continue
        for loc, place in zip(op.locs, reply.value.places, strict=True):
            row = loc // span * page + loc % page
            exact = Place(owner=loc % span // page, row=row, offset=row * reply.value.row_bytes)
            expect(place, exact, f"place of loc {loc}", "one page per owner in turn, offset = row * row_bytes")


@case(
    "placement.rows_inside_buffers",
    invariants=("I01", "I22"),
    needs=("op.locate", "snapshot.buffers", "snapshot.free"),
    seen={},
    plan=whole_range,
    configs=configs(),
    examples=0.3,
)
def test_rows_inside_buffers(step: Step) -> None:
    """Every row that a page of the pool can point to lies inside the buffer of every component.

    A side buffer sized as size * N + page instead of (size + page) * N is written past its end (sglang#36990).
    """
    places = dict(located(step))
    for rank in step.after.ranks:
        last = (
            max(page for pages in rank.free or () for page in pages) * step.config.page_size + step.config.page_size - 1
        )
        row = max(place.row for loc, place in places.items() if loc <= last)
        for name, buffer in (rank.buffers or {}).items():
            require(
                row < buffer.rows,
                f"row {row} of a pool page, buffer {name!r} of rank {rank.rank} with {buffer.rows} rows",
                f"more than {row} rows",
                "the allocator can hand out this page",
            )


@case(
    "placement.classes_are_owners",
    invariants=("I01", "I15"),
    needs=("op.locate", "snapshot.free"),
    seen={},
    plan=whole_range,
    configs=configs(),
    examples=0.3,
)
def test_classes_are_owners(step: Step) -> None:
    """All pages of an owner class lie on one owner, and no two classes share an owner.

    The allocator balances classes by one rule and the pool stores by another: one rank overflows (sglang#28718).
    """
    places = dict(located(step))
    page = step.config.page_size
    for rank in step.after.ranks:
        owners = [sorted({places[each * page].owner for each in pages}) for pages in rank.free or ()]
        expect(
            [len(each) for each in owners],
            [1] * len(owners),
            f"owners per class, {owners}, on rank {rank.rank}",
            "one owner",
        )
        expect(
            len({each[0] for each in owners}),
            len(owners),
            f"different owners of the classes of rank {rank.rank}",
            "its own",
        )


@case(
    "placement.cyclic_owners",
    invariants=("I01", "I15"),
    needs=("snapshot.requests", "snapshot.nodes", "snapshot.free", "promise.rotates"),
    seen={"raced": 1, "extended": 3, "hit": 1, "continued": 1},
    plan=machine(),
    configs=sharded,
)
def test_cyclic_owners(step: Step) -> None:
    """Page P of every chain belongs to owner class (base + P) mod N, however fragmented the pool is.

    Owners taken from page ids instead of positions, two rotation runs spliced into one path (sglang#28718).
    """
    shards = step.config.shards
    for rank in step.after.ranks:
        owner = step.classes(rank)
        chains = [(f"request {name}", 0, view.base, view.pages) for name, view in (rank.requests or {}).items()]
        chains += [(f"node {node.node}", node.start, node.base, node.pages) for node in rank.nodes or ()]
        for name, start, base, pages in chains:
            if not pages:
                continue
            require(
                base is not None, f"no rotation base on {name} of rank {rank.rank}", "a base", f"it holds pages {pages}"
            )
            expect(
                [owner.get(page) for page in pages],
                [
                    (base or 0) % shards if shards == 1 else ((base or 0) + start + at) % shards
                    for at in range(len(pages))
                ],
                f"owner classes of {name} on rank {rank.rank} (base {base}, pages {list(pages)} from position {start})",
                "pages rotate over the owners from the chain's base",
            )
