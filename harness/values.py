"""Which values an op may return."""

from __future__ import annotations

from harness.types import Done, Evicted, Extended, Finished, Generated, Located, Op, Opened, Received, Value, op_name


def values_of(op: Op | str) -> tuple[type[Value], ...]:
    """What a successful op returns, one of these; nothing for `together`, whose ops reply one by one."""
    by_name: dict[str, tuple[type[Value], ...]] = {
        "open": (Opened,),
        "extend": (Extended,),
        "finish": (Finished,),
        "evict": (Evicted,),
        "flush": (Evicted, Done),
        "receive": (Received,),
        "locate": (Located,),
        "generate": (Generated,),
        "together": (),
    }
    return by_name.get(op if isinstance(op, str) else op_name(op), (Done,))
