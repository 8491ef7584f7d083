"""Right variants of the second tier and of transfers, for `variants`."""

from __future__ import annotations

from harness.fault import Edit, Variant

TIERS = (
    Variant(
        "restores_all_layers_first",
        "No layer is gathered before all layers of the prefix are back from the host.",
        changes=(Edit("kvshard_ref.gather:PrefixGather.prefetch", "self._loads[layer]", "self._loads[-1]"),),
    ),
    Variant(
        "writes_back_instead",
        "With write-through, too, pages are copied when they are evicted.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.__init__",
                'host_policy == "write_back"',
                'host_policy != "write_through_selective"',
            ),
            Edit(
                "kvshard_ref.host_tier:HostTier.__init__",
                "self.policy = policy",
                'self.policy = "write_back" if policy == "write_through" else policy',
            ),
            Edit(
                "kvshard_ref.worker:PrefillWorker._copy",
                'self.spec.host_policy == "write_back"',
                'self.spec.host_policy != "write_through_selective"',
            ),
        ),
        drops=("copies_all",),
    ),
    Variant(
        "writes_through_and_back",
        "With write-through, what had no room on the host is copied when it is evicted.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.__init__",
                'host_policy == "write_back"',
                'host_policy != "write_through_selective"',
            ),
            Edit(
                "kvshard_ref.worker:PrefillWorker._copy",
                'self.spec.host_policy == "write_back"',
                'self.spec.host_policy != "write_through_selective"',
            ),
        ),
    ),
    Variant(
        "host_keeps_the_oldest",
        "A copy is not made when the host is full: none makes room for another.",
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.back_up",
                'self.allocator.free(self.tree.evict(short, "host").slots)',
            ),
        ),
    ),
    Variant(
        "tiers_are_exclusive",
        "With write-back a copy leaves the host once its pages are back on the device.",
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.acknowledge",
                "self.tree.pin(copy.node, len(copy.pages), -1)",
                """
                self.tree.pin(copy.node, len(copy.pages), -1)
                left = len(copy.pages) if copy.kind == "restore" and self.policy == "write_back" else 0
                for node in self.tree.path(copy.node):
                    if left > 0 and node.pages and not node.pins:
                        self.allocator.free(node.slots)
                        node.slots = []
                    left -= len(node.keys)
                    self.tree._offer(node)
                """,
            ),
        ),
        drops=("keeps_copies",),
    ),
    Variant(
        "acknowledges_one_by_one",
        "An op acknowledges at most one copy; a settle waits for all.",
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.progress",
                "self._acknowledge(self.group.minimum([done])[0])",
                "self._acknowledge(min(1, self.group.minimum([done])[0]))",
            ),
            Edit(
                "kvshard_ref.worker:PrefillWorker.settle",
                "self._device_module.synchronize()",
                "self._device_module.synchronize(); self._drain()",
            ),
        ),
    ),
    Variant(
        "selects_what_three_used",
        "The selective policy copies what three finished requests have used.",
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.used",
                "each.hits < HITS_MIN[self.policy]",
                "each.hits < HITS_MIN[self.policy] * 3 / 2",
            ),
        ),
        drops=("copies_all",),
    ),
    Variant(
        "counts_complete_copies",
        "Copies between the tiers count when all ranks have acknowledged them.",
        changes=(
            Edit("kvshard_ref.host_tier:HostTier.back_up", "self.backup_pages += len(slots)"),
            Edit("kvshard_ref.host_tier:HostTier.restore", "self.restored_pages += len(slots)"),
            Edit(
                "kvshard_ref.host_tier:HostTier.acknowledge",
                "copy = self.in_flight.popleft()",
                """
                copy = self.in_flight.popleft()
                self.backup_pages += len(copy.slots) * (copy.kind == "backup")
                self.restored_pages += len(copy.slots) * (copy.kind == "restore")
                """,
            ),
            Edit("kvshard_ref.host_pool:HostPool.backup", "self.backup_bytes += fresh.nbytes"),
            Edit("kvshard_ref.host_pool:HostPool.restore", "self.restored_bytes += fresh.nbytes"),
            Edit(
                "kvshard_ref.worker:PrefillWorker._acknowledge",
                "del self._copied[:count]",
                """
                del self._copied[:count]
                for copy in list(self.cache.host.in_flight)[:count] if self.host and self.cache.host else ():
                    own = sum(slot % self.pool.placement.shards == self.pool.rank for slot in copy.slots)
                    size = sum(host.pages[0].nbytes for layer in self.host.rows for _, host in layer)
                    self.host.backup_bytes += own * size * (copy.kind == "backup")
                    self.host.restored_bytes += own * size * (copy.kind == "restore")
                """,
            ),
        ),
    ),
)

TRANSFERS = (
    Variant(
        "sends_at_the_end",
        "Nothing of a request is sent before its last chunk.",
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.send",
                "self.started = True",
                """
                self.started = True
                if not last:
                    return
                """,
            ),
        ),
    ),
    Variant(
        "writes_page_by_page",
        "Each page of a transfer is a write of its own.",
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.advance",
                "self._tickets.append(self._link.write(self.use[0], copies))",
                "self._tickets += [self._link.write(self.use[0], [copy]) for copy in copies]",
            ),
        ),
    ),
)
