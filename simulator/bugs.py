"""Known bugs as patches of the package: `simulator.mutants` makes each again in a copy, and something must find it.

Production code has no switch for any of it. `PYTHON` are patches of modules; `NATIVE` those of the C++ core.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Args:
        name: what is wrong.
        like: the report of such a bug in the field; "here": it was ours; "-": none.
        file: below src/mainstem.
        patches: old text and new text.
        by: a profile that finds it, or a test: `tests/...::name`.
    """

    name: str
    like: str
    file: str
    patches: tuple[tuple[str, str], ...]
    by: str = "cache"


def _mutant(name: str, like: str, file: str, old: str, new: str, by: str = "cache") -> Mutant:
    return Mutant(name, like, file, ((old, new),), by)


_SEALER, _STORE, _CALLS, _PENDING, _HOST = (
    "tiers/storage/sealer.py",
    "tiers/storage/store.py",
    "tiers/storage/calls.py",
    "tiers/pending.py",
    "tiers/host/tier.py",
)
_BACKUP, _LOAD = "tiers/host/backup.py", "tiers/host/load.py"
_PREFETCH, _READS, _ATTACH_POINT, _BIDIRECTIONAL, _WARM = (
    f"tiers/prefetch/{part}.py" for part in ("prefetch", "reads", "attach_point", "bidirectional", "warm")
)
_WRITE = "tiers/storage/write.py"
_SCHEDULER, _SEQUENCE = "runtime/schedule/scheduler.py", "runtime/schedule/sequence.py"
_SHARING, _FOLDING = "runtime/attention/sharing.py", "runtime/attention/folding.py"
_DECODERS = "runtime/kernels/decoders.py"
_GPU_SPANS, _GPU_BITS = "runtime/attention/triton_spans.py", "tests/runtime/test_gpu_bits.py::"
_AUDIT, _AUDITED = "runtime/audit/prefix_audit.py", "tests/runtime/audit/test_audit.py::"
_BREAKER = "storage/breaker.py"
_TRITON = "runtime/attention/triton_attention.py"
_RETENTION = "cache/retention.py"
_SESSIONS = "runtime/hints/sessions.py"
_VERSIONS, _ENGINE_CORE = "runtime/schedule/versions.py", "runtime/engine_core.py"
_WEIGHED = "tests/runtime/test_weights.py::"
_FEED, _REPLICA, _FRONT = "events/feed.py", "events/replica.py", "fleet/front/app.py"

# fmt: off
PYTHON: tuple[Mutant, ...] = (
    # ---------------------------------------------------------------- keys of pages, and their verification
    _mutant(
        "stored keys leave out the namespace", "sglang#26747", _SEALER,
        "+ self._identity + namespace", "+ self._identity",
    ),
    _mutant(
        "stored keys leave out the identity", "sglang#33268", _SEALER,
        'data = len(self._identity).to_bytes(8, "little") + self._identity + namespace', "data = namespace",
    ),
    _mutant(
        "the identity leaves out the weights", "sglang#26792", "cache/identity.py",
        'if field.name in ("tp_rank", "tp_size"):', 'if field.name in ("tp_rank", "tp_size", "weights"):',
        "tests/cache/test_identity.py::test_equal_bytes_mean_equal_identities",
    ),
    _mutant(
        "stored keys leave out the shard", "sglang#26670", _SEALER,
        'suffix = len(row).to_bytes(8, "little") + row + self._shard', 'suffix = len(row).to_bytes(8, "little") + row',
        "tests/tiers/storage/test_tiers_sealer.py::test_keys_and_pages_are_the_same_in_every_process_and_version",
    ),
    _mutant(
        "stored keys leave out the component", "-", _SEALER,
        'suffix = len(row).to_bytes(8, "little") + row + self._shard', "suffix = self._shard",
        "hybrid",
    ),
    _mutant(
        "a page's key does not depend on the pages before it", "vllm#8229", _SEALER,
        'self._named(b"page" + parent + symbols', 'self._named(b"page" + symbols',
    ),
    _mutant(
        "keys of 8 bits: different pages collide", "CVE-2025-25183", _SEALER,
        "return self._blake3(data, key=self._name_key).digest()",
        "return self._blake3(data, key=self._name_key).digest()[:1] * 32",
    ),
    _mutant(
        "the tag is not checked", "sglang#39269", _SEALER,
        " or bytes(slot[_TAG]) != self._tag(slot)", "",
    ),
    _mutant(
        "the tag covers the header only", "LMCache#4463", _SEALER,
        "        hasher.update(slot[HEADER_BYTES:])\n", "",
    ),
    _mutant(
        "the tag needs no secret", "-", _SEALER,
        "self._blake3(slot[: _TAG.start], key=self._tag_key)", "self._blake3(slot[: _TAG.start])",
    ),
    _mutant(
        "an intact page of another key is accepted", "openvino.genai#3722", _SEALER,
        'return None if stored == key else "misdirected"', "return None",
    ),
    _mutant(
        "an adapter and a salt with one name share a namespace", "vllm#44701", "cache/namespaces.py",
        '_field(b"s", self.salt)', '_field(b"a", self.salt)',
    ),
    _mutant(
        "a lease ignores its namespace", "CVE-2025-46570", "cache/prefix_cache.py",
        'name = b"" if namespace is None else encode_namespace(namespace)', 'name = b""',
    ),
    # ---------------------------------------------------------------- the store
    _mutant(
        "a hole in a read is skipped", "sglang#26886", _STORE,
        "                    return good\n                try:\n                    self._packing.unpack",
        "                    continue\n                try:\n                    self._packing.unpack",
    ),
    _mutant(
        "a call over its deadline frees its slots while it runs", "TensorRT-LLM#15546", _CALLS,
        "        self.overdue()\n        return False", "        return self.overdue()",
    ),
    _mutant(
        "calls have no deadline", "LMCache#1491", _CALLS,
        "if self._calls.clock() < self._deadline_s():", "if True:",
    ),
    _mutant(
        "an exception of a client ends the worker", "sglang#39269", _CALLS,
        "    except BaseException:  # third-party", "    except ZeroDivisionError:  # third-party",
    ),
    _mutant(
        "the breaker never opens", "Mooncake#2253", _BREAKER,
        "        self._failures += 1\n", "",
    ),
    _mutant(
        "the breaker never closes", "-", _BREAKER,
        "        self._failures, self._trying = 0, False", "        self._trying = False",
    ),
    _mutant(
        "the write queue is unbounded", "sglang#26670", _WRITE,
        "if self.pages and self.pages + len(write.names) > self._store.config.queue_pages:", "if False:",
    ),
    _mutant(
        "the queue of states is unbounded", "-", _WRITE,
        "        if len(self._states) >= self._store.config.queue_pages:\n", "        if False:\n",
        "hybrid",
    ),
    _mutant(
        "a state that storage did not take counts as stored for good", "-", "tiers/host/backup.py",
        "                    self._writes.again(node)", "                    pass",
        "tests/tiers/test_tiers_hybrids.py::test_a_state_that_could_not_be_written_is_written_when_it_is_used_again",
    ),
    _mutant(
        "pages are stored after a gap", "-", _STORE,
        "            if needed and not next(there):\n                return Written(0, gap=True, whole=False)\n",
        "            if needed:\n                next(there)\n",
        "tests/tiers/storage/test_tiers_store.py::test_nothing_is_stored_after_a_gap",
    ),
    _mutant(
        "a state is encoded by a codec that loses", "-", "tiers/storage/rows.py",
        'return row.exact or self._codec.name == "none"', 'return self._codec.name == "none"',
        "tests/tiers/storage/test_tiers_store.py::test_an_exact_row_is_stored_as_it_is_whatever_the_codec",
    ),
    _mutant(
        "a codec takes states for rows of attention", "-", "tiers/storage/rows.py",
        "Row(row, name, isinstance(tree.components[row], State))", "Row(row, name, False)",
        "tests/tiers/test_tiers_hybrids.py::test_states_are_kept_exact",
    ),
    # ---------------------------------------------------------------- writes of windows and states
    _mutant(
        "a state is stored as that of another position", "-", _WRITE,
        "self._add_state(node, names[self._core.end(node) - begin - 1])", "self._add_state(node, names[-1])",
        "hybrid",
    ),
    _mutant(
        "a write holds the window of its last node only", "-", _WRITE,
        "locks = nodes if self._late else nodes[-1:]", "locks = nodes[-1:]",
        "tests/tiers/test_tiers_components.py::test_a_write_holds_the_windows_of_all_its_nodes",
    ),
    _mutant(
        "window pages that a write does not hold are written", "-", _WRITE,
        "mine = np.zeros(end, np.bool_)", "mine = np.ones(end, np.bool_)",
        "tests/tiers/test_tiers_components.py::test_window_pages_that_a_write_does_not_hold_are_not_written",
    ),
    _mutant(
        "pages that the host does not have, or not yet, are written", "here", _WRITE,
        "ids = self._present(write.node, row.number, write.begin)  # a copy of some may have failed\n"
        "        pages = np.flatnonzero(mine[write.begin :] & (ids >= 0))\n",
        "ids = self._core.ids(write.node, row.number, HOST)[write.begin :]\n"
        "        pages = np.flatnonzero(mine[write.begin :])\n",
        "components",
    ),
    _mutant(
        "states are written in the order in which they came", "-", _WRITE,
        "self._begin_state(max(self._states, key=self._worth))", "self._begin_state(self._states[0])",
        "tests/tiers/test_tiers_hybrids.py::test_states_where_prompts_part_or_end_are_written_first",
    ),
    _mutant(
        "a removal deletes one component", "-", _WRITE,
        "self._store.delete(self.rows, names)", "self._store.delete(self.rows[:1], names)",
        "tests/tiers/test_tiers_hybrids.py::test_a_removal_deletes_every_component",
    ),
    # ---------------------------------------------------------------- back up
    _mutant(
        "a host page is served before its copy has ended", "vllm#45704", _BACKUP,
        "        if not self.ticket.done():\n            return 0\n        if self.above",
        "        if self.above",
    ),
    _mutant(
        "a failed copy counts as complete", "LMCache-Ascend#270", _BACKUP,
        "return FAILED if self.above is not None or self.ticket.error is not None else ARRIVED",
        "return FAILED if self.above is not None else ARRIVED",
    ),
    _mutant(
        "a copy does not wait for its parent's", "sglang#31679", _BACKUP,
        "above = self.flights.get(self._core.in_flight_above(held[-1], HOST))", "above = None",
    ),
    _mutant(
        "a failed copy is undone before the copies below it", "sglang#31679", _BACKUP,
        "        if backup.below:\n            return\n", "",
    ),
    Mutant(
        "a device page is not locked while it is backed up", "sglang#28468", _BACKUP,
        (
            ("                self._core.lock(at, DEVICE)\n", ""),
            ("            self._core.unlock(node, DEVICE)\n", ""),
        ),
    ),
    _mutant(
        "evicted host pages are not returned to the pool", "sglang#16067", _HOST,
        "        self._reclaim(self.tree.evict_for(ns, missing,", "        list(self.tree.evict_for(ns, missing,",
    ),
    _mutant(
        "a stale handle ends the scheduler", "-", _BACKUP,
        "            except StaleHandle:\n", "            except ZeroDivisionError:\n",
    ),
    _mutant(
        "a node in flight is copied again", "here", _BACKUP,
        "missing = list(takewhile(lambda at: at not in self.flights, lacking))", "missing = list(lacking)",
        "components",
    ),
    _mutant(
        "a copy waits only for the copy above its first node", "here", _BACKUP,
        "self._core.in_flight_above(held[-1], HOST)", "self._core.in_flight_above(held[0], HOST)",
        "tests/tiers/test_tiers_components.py::test_a_copy_waits_for_every_copy_above_its_last_node",
    ),
    # ---------------------------------------------------------------- load
    _mutant(
        "a load is published before it has arrived", "vllm#47282", _LOAD,
        "        if not self.ticket.done():\n            return 0\n        return ARRIVED if",
        "        return ARRIVED if",
    ),
    _mutant(
        "a failed load counts as arrived", "vllm#49250", _LOAD,
        "return ARRIVED if self.ticket.error is None else FAILED", "return ARRIVED",
    ),
    _mutant(
        "a layer is not waited for", "vllm#46278", _SEQUENCE,
        "None if self._load is None else self._load.ticket,", "None,",
        "scheduler",
    ),
    _mutant(
        "attention does not wait for its layer", "vllm#46278", "runtime/attention/paged.py",
        "        ticket.wait_layer(index)\n", "        del ticket\n",
        "tests/runtime/models/test_runner.py::test_layers_are_computed_while_the_next_ones_arrive",
    ),
    _mutant(
        "what was computed after a failed load is kept", "vllm#49250", _SCHEDULER,
        "        if not failed:\n            return scheduled, sampled, logits\n",
        "        return scheduled, sampled, logits\n",
        "scheduler",
    ),
    _mutant(
        "a forward's pages are published while they arrive", "vllm#39702", _SEQUENCE,
        "if load is None or load.wait():", "if True:",
        "scheduler",
    ),
    _mutant(
        "two requests prefetch for each other forever", "here", "runtime/schedule/prompt_prefetch.py",
        "again and self._begun < _MOST and self._tiers is not None\n        if again and prefetch is not None "
        "and prefetch.ended and prefetch.shared and prefetch.loaded:",
        "again and self._tiers is not None\n        if again and prefetch is not None "
        "and prefetch.ended and prefetch.shared:",
        "scheduler",
    ),
    _mutant(
        "evicted states are not backed up", "-", _BACKUP,
        "if self.begin(victim):", "if row == 0 and self.begin(victim):",
        "tests/tiers/test_tiers_leases.py::test_states_that_are_evicted_are_written_back",
    ),
    _mutant(
        "where all layers slide, a load counts only the pages that it copies", "here", _LOAD,
        "        self._number, pairs = lease.begin_load()\n",
        "        self._number, pairs = lease.begin_load()\n        self.pages = len(pairs[0][0])\n",
        "tests/tiers/test_tiers_leases.py::test_what_the_host_has_is_loaded_and_is_a_hit_of_the_next_one",
    ),
    _mutant(
        "after a failed load a request does not go back to its hit", "-", _SEQUENCE,
        "        self.computed = self._lease.hit\n        return False", "        return False",
        "hybrid-scheduler",
    ),
    _mutant(
        "a rejected draft stays in the cache", "-", "runtime/schedule/outputs.py",
        "drafted, kept = sequence.take_draft(), max(len(sampled) - 1, 0)",
        "drafted = kept = sequence.take_draft()\n        sequence.computed += drafted - len(sampled) + 1",
        "tests/runtime/schedule/test_scheduler.py::test_drafts_that_are_wrong_are_overwritten_and_never_published",
    ),
    _mutant(
        "a draft is accepted although another token was drawn", "-", "runtime/sampling/sampler.py",
        "_token(chosen[i][at]) == drafts[i][at]", "chosen[i][at] is not None",
        "tests/runtime/schedule/test_scheduler.py::test_drafts_that_are_wrong_are_overwritten_and_never_published",
    ),
    _mutant(
        "a sequence with a state, which cannot go back, has drafts", "-", _SEQUENCE,
        "if self.prefilling or self._page_size:", "if self.prefilling:",
        "tests/runtime/schedule/test_scheduler_components.py::test_random_work_gives_what_it_would_give_without_a_cache",
    ),
    _mutant(
        "where all layers slide, a load needs pages for the whole prompt", "here", _SCHEDULER,
        "        if Full.name not in self._cache.pools:\n            return True  #", "        #",
        "tests/runtime/test_engine_hybrid.py::test_a_prompt_longer_than_all_windows_is_loaded",
    ),
    _mutant(
        "a hit ends inside a page that is not copied", "LMCache-Ascend#270", "cache/prefix_cache.py",
        "                self._copy_page(*copy)\n", "",
    ),
    # ---------------------------------------------------------------- prefetch
    _mutant(
        "pages that fail verification are accepted", "LMCache#4467", _READS,
        "return 1 if self.call.failed else 2 + self.call.value", "return 2 + len(self.page_ids)",
    ),
    _mutant(
        "every batch reads the keys of the first one", "sglang#5221", _PREFETCH,
        "self._point.names(begin, begin + len(page_ids))",
        "self._point.names(self._plan.have, self._plan.have + len(page_ids))",
    ),
    _mutant(
        "batches are added in the order of their arrival", "ATOM#1807", _READS,
        "        while self._begun and self._begun[0].ended:\n            yield self._begun.popleft()\n",
        "        yield from self.take_ended()\n",
    ),
    _mutant(
        "pages after a miss are accepted", "sglang#39444", _PREFETCH,
        "                self._enter(Phase.DRAINING)\n", "",
    ),
    _mutant(
        "what was read after a damaged page is kept", "-", _PREFETCH,
        "good = read.good if self._phase is Phase.FORWARD else 0", "good = read.good",
    ),
    _mutant(
        "a page that did not arrive is read again for ever", "-", _PREFETCH,
        "                self._plan.stored[read.row][read.begin + kept] = False\n", "",
    ),
    _mutant(
        "pages are inserted where some of another component are in flight", "here", _ATTACH_POINT,
        "rows = range(len(self._tree.components)) if self.node else ()", "rows = range(1) if self.node else ()",
        "tests/tiers/test_tiers_hybrids.py::test_what_was_read_waits_while_any_component_of_the_node_above_is_in_flight",
    ),
    _mutant(
        "a window is judged one position short", "-", "cache/components.py",
        "return np.maximum(ends - self.tokens, 0)", "return np.maximum(ends - self.tokens + 1, 0)",
        "tests/tiers/prefetch/test_tiers_plan.py",
    ),
    _mutant(
        "a chunk is judged from the boundary before the end, or at it", "-", "cache/components.py",
        "return ends - ends % self.tokens\n", "return ends - (ends - 1) % self.tokens - 1\n",
        "tests/tiers/prefetch/test_tiers_plan.py",
    ),
    _mutant(
        "a state is judged one page off", "-", "tiers/prefetch/plan.py",
        "allowed &= there[self.have : most]", "allowed &= np.roll(there, 1)[self.have : most]",
        "tests/tiers/prefetch/test_tiers_plan.py",
    ),
    _mutant(
        "states are inserted before what they follow", "-", "tiers/prefetch/plan.py",
        "for row in range(len(self._components)):\n            first",
        "for row in reversed(range(len(self._components))):\n            first",
        "tests/tiers/test_tiers_hybrids.py::test_a_restarted_process_finds_every_component_again",
    ),
    _mutant(
        "what arrived before its turn joins the tree a page too far", "-", _PREFETCH,
        "load.add(read.begin, ", "load.add(read.begin + 1, ",
        "scheduler",
    ),
    _mutant(
        "what arrived before its turn counts as arrived to its end", "-", _READS,
        "read.good, read.failed, read.ended = max(0, outcome - 2), outcome == 1, True",
        "read.good, read.failed, read.ended = len(read.page_ids), outcome == 1, True",
        "scheduler",
    ),
    _mutant(
        "what was never met is never freed", "-", _BIDIRECTIONAL,
        "            self._host.pools[0].release(page_ids)\n", "            pass\n",
        "scheduler",
    ),
    _mutant(
        "a duplicate is freed twice", "sglang-jax#982", _ATTACH_POINT,
        "        self._host.pools[row].release(page_ids[~ours])\n",
        "        self._host.pools[row].release(page_ids[~ours])\n" * 2,
    ),
    _mutant(
        "a duplicate is lost", "sglang#16067", _ATTACH_POINT,
        "        self._host.pools[row].release(page_ids[~ours])\n", "",
    ),
    _mutant(
        "duplicates count as pages of the tree", "mini-sglang#142", _ATTACH_POINT,
        "ours[:kept] = theirs[begin - first : length - first] == page_ids[:kept]", "ours[:kept] = True",
    ),
    Mutant(
        "host pages may be evicted while they are written to storage", "Mooncake#4239", _WRITE,
        (
            ("            self._core.lock(node, HOST)\n", "            pass\n"),
            ("            self._core.unlock(node, HOST)\n", "            pass\n"),
        ),
    ),
    _mutant(
        "with a limit of one prefetch nothing is warmed", "here", _WARM,
        "len(self._prefetches) < max(1, self._store.config.max_prefetches // 2)",
        "len(self._prefetches) < self._store.config.max_prefetches // 2",
    ),
    _mutant(
        "a request waits for a stuck store", "LMCache#5047", _PREFETCH,
        "Polled(self._late, self._expire)", "Polled(lambda: self.ended, self._expire)",
    ),
    _mutant(
        "the wait ignores the speed of the machine", "here", "tiers/prefetch/waits.py",
        "if cost_s is None:", "if True:",
        "tests/tiers/prefetch/test_tiers_prefetch.py::test_timeout_waits_as_long_as_computing_takes_once_that_is_known",
    ),
    _mutant(
        "a listed prefix is warmed only as far as a prefetch under way shares it", "here", _WARM,
        "if self._prefetches.overlaps(namespace, key):", "if False:",
        "tests/tiers/prefetch/test_tiers_warm.py::test_a_conversation_is_warmed_whole_though_each_turn_adds_little",
    ),
    _mutant(
        "a stuck store occupies the host", "sglang#33862", _HOST,
        "            self._writes.give_way()", "            return False",
        "tests/tiers/host/test_tiers_host.py::test_a_stuck_store_does_not_occupy_the_host",
    ),
    # ---------------------------------------------------------------- ranks
    _mutant(
        "a rank uses its own votes", "sglang#31425", _PENDING,
        "                votes = self._agree(votes)\n", "                self._agree(votes)\n",
        "ranks",
    ),
    _mutant(
        "what somebody waits for is settled twice", "-", _PENDING,
        "        self._settle_ended()\n        while left", "        while left",
        "tests/tiers/prefetch/test_tiers_pending.py::test_what_somebody_waits_for_meanwhile_is_settled_once",
    ),
    _mutant(
        "a rank uses its own gap in storage", "sglang#30760", _WRITE,
        "if outcome == FAILED and write.before:", "if write.call.value.gap:",
        "ranks",
    ),
    _mutant(
        "a rank uses its own lookup", "sglang#22607", _PREFETCH,
        "self._agreed(self._plan.pages, outcome)\n", "self._agreed(self._plan.pages, 1 + (self._offer or 0))\n",
        "ranks",
    ),
    # ---------------------------------------------------------------- images and adapters
    _mutant(
        "the shape of an image is not in its identity", "CVE-2025-46722", "runtime/text/vision.py",
        "json.dumps([mode, pixels.dtype.str, pixels.shape])", "json.dumps([mode, pixels.dtype.str])",
        "tests/runtime/text/test_vision.py::test_equal_bytes_of_another_mode_or_shape_are_another_image",
    ),
    _mutant(
        "the mode of an image is not in its identity", "CVE-2025-46722", "runtime/text/vision.py",
        "json.dumps([mode, pixels.dtype.str, pixels.shape])", "json.dumps([pixels.dtype.str, pixels.shape])",
        "tests/runtime/text/test_vision.py::test_equal_bytes_of_another_mode_or_shape_are_another_image",
    ),
    _mutant(
        "a hit ends inside an image", "-", "cache/keys.py",
        "return start if inside else min(position, self._length)", "return min(position, self._length)",
        "tests/cache/test_keys.py",
    ),
    _mutant(
        "a chunk ends inside an image", "-", "runtime/schedule/checkpoints.py",
        "    if span is None:\n        return end\n", "    return end\n",
        "tests/runtime/schedule/test_checkpoints.py",
    ),
    _mutant(
        "an adapter's prefixes are the base model's", "here", "runtime/engine.py",
        "return replace(namespace, adapter=adapter.namespace), adapter",
        "return replace(namespace, adapter=None), adapter",
        "tests/runtime/models/test_adapters.py",
    ),
    # ---------------------------------------------------------------- the file store
    _mutant(
        "the index is trusted after a restart", "LMCache#562", "storage/file/index.py",
        "if self._checksum(body, _FORMAT) == checksum:", "if True:",
        "tests/storage/file/test_storage_file_damage.py",
    ),
    _mutant(
        "a value's digest is not compared", "sglang#39269", "storage/file/values.py",
        "if self._digest(piece.buffer) != piece.entry.digest", "if False",
        "tests/storage/file/test_storage_file_damage.py",
    ),
    _mutant(
        "space is returned to the disk before that is durable", "-", "storage/file/backend.py",
        '        if self._sync:\n            self._folder.sync("values")\n        self._catalog.shrink(cut)',
        "        self._catalog.shrink(cut)",
        "tests/storage/file/test_storage_file_crash.py",
    ),
    # ---------------------------------------------------------------- events
    _mutant(
        "the first page of a sequence is told with the hash of its namespace as parent", "-", "events/source.py",
        "before if start else None", "before",
    ),
    _mutant(
        "what was dropped is stored anew, but nothing is cleared", "-", "events/source.py",
        "            events.append(AllBlocksCleared())\n", "",
    ),
    _mutant(
        "what was left of a state that is stored anew comes after the next one", "-", "events/source.py",
        "            self._moves.clear()\n", "",
        "tests/events/test_events_source.py::test_who_does_not_follow_a_state_that_is_stored_anew_gets_it_again",
    ),
    _mutant(
        "who comes too late for a replay gets what is left of it", "-", "events/feed.py",
        "if oldest <= first or (state is None and oldest == self._first):", "if self._kept:",
    ),
    _mutant(
        "a batch that comes again is followed again", "-", "events/feed.py",
        "        if number <= self._last:\n            return\n", "",
        "tests/events/test_events_feed.py::test_a_late_live_batch_does_not_undo_a_replay",
    ),
    _mutant(
        "a server that begins anew clears nothing", "-", "events/feed.py",
        "= [AllBlocksCleared()]  # the first", "= []  # the first",
        "tests/events/test_events_feed.py::test_the_first_batch_makes_void_what_was_known_of_an_earlier_server",
    ),
    _mutant(
        "a page that leaves one medium is forgotten on all", "-", "events/replica.py",
        "not (block.media or self._continued[hash_])", "not self._continued[hash_]",
    ),
    _mutant(
        "a state leaves out what its pages continue", "here", "events/source.py",
        "while at in known and at not in done:", "while at in stored and at not in done:",
        "tests/events/test_events_source.py::test_what_continues_pages_that_are_nowhere_keeps_its_place",
    ),
    # ---------------------------------------------------------------- fleets
    _mutant(
        "a gap in the numbers of batches is not noticed", "-", _FEED,
        "return self._last + 1 if number > self._last + 1 else None", "return None", "fleet",
    ),
    _mutant(
        "a batch that comes late, of this life or a former one, counts again", "-", _FEED,
        "        if number <= self._last:\n            return\n", "", "fleet",
    ),
    _mutant(
        "a replica that begins anew counts its batches from the beginning", "-", _FEED,
        "self._next = int(now_s * 1000) * _NUMBERS", "self._next = 0", "fleet",
    ),
    _mutant(
        "an index loses removals", "-", _REPLICA,
        "                    self._remove(event)\n", "                    pass\n", "fleet",
    ),
    _mutant(
        "an index keeps what was cleared", "-", _REPLICA,
        "                    self.blocks.clear()\n", "                    pass\n", "fleet",
    ),
    _mutant(
        "a request whose replica dies before its first token is not sent again", "-", _FRONT,
        "_MOST_DEATHS = 3", "_MOST_DEATHS = 1", "fleet",
    ),
    _mutant(
        "a stream whose replica dies begins again on another one", "-", _FRONT,
        "progress=sender.progress)", "progress=None)", "fleet",
    ),
    _mutant(
        "what was sent last of a stream is not known to who goes on with it", "-", _FRONT,
        "            self.progress.add(piece.sent)\n", "            pass\n", "fleet",
    ),
    _mutant(
        "one full replica refuses for all", "-", _FRONT,
        "(head.status == _FULL and (others or sender.started))", "(head.status == _FULL and sender.started)", "fleet",
    ),
    _mutant(
        "a replica that drains refuses for all", "-", "fleet/front/asking.py",
        "ELSEWHERE = (421, 503)", "ELSEWHERE = (421,)", "fleet",
    ),
    _mutant(
        "a request that has ended counts as under way", "-", "fleet/front/routing.py",
        "                self._core.ended(self._replicas[replica].number, self._clock())\n", "                pass\n",
        "tests/fleet/test_fleet_routing.py::test_a_queue_ends_with_time_and_with_the_last_request",
    ),
    _mutant(
        "a dead replica stays in the index", "-", "fleet/front/routing.py",
        "for gone in sorted(set(self._replicas) - set(replicas)):", "for gone in ():", "fleet",
    ),
    _mutant(
        "a queue that was reported begins anew with each list of replicas", "-", "fleet/front/routing.py",
        "if statistics != replica.statistics and ", "if ",
        "tests/fleet/test_fleet_routing.py::"
        "test_a_queue_that_was_reported_counts_once_until_something_else_is_said",
    ),
    _mutant(
        "a page that a peer sends is not verified", "-", "tiers/storage/sealed.py",
        "read_fault(len(slot), length) or sealer.verify(slot, key)", "read_fault(len(slot), length)", "fleet",
    ),
    # ---------------------------------------------------------------- attention over the tree
    _mutant(
        "a shared run is read one page too far", "-", _FOLDING,
        "for member in whole.members], *bounds)", "for member in whole.members], bounds[0], bounds[1] + size)",
        "tests/runtime/attention/test_page_attention.py::test_results_are_those_request_by_request",
    ),
    _mutant(
        "a shared run is read one page short", "-", _FOLDING,
        "for member in whole.members], *bounds)", "for member in whole.members], bounds[0], bounds[1] - size)",
        "tests/runtime/attention/test_page_attention.py::test_results_are_those_request_by_request",
    ),
    _mutant(
        "a run is shared one page after its members part", "-", _SHARING,
        "begin + int(equal.argmin())", "begin + int(equal.argmin()) + 1",
        "tests/runtime/attention/test_page_attention.py::test_results_are_those_request_by_request",
    ),
    _mutant(
        "a sharer is in the group of another prefix", "-", _SHARING,
        "(ids[group[1:], begin:] ==", "(ids[group[1:2], begin:] ==",
        "tests/runtime/attention/test_page_attention.py::test_results_are_those_request_by_request",
    ),
    _mutant(
        "a layer in one call forgets the adapter", "-", _DECODERS,
        "            and not paging.adapted\n", "",
        "tests/runtime/kernels/test_decoders.py::test_an_adapter_is_computed_by_its_own_layers",
    ),
    _mutant(
        "a layer that clamps is taken for one that does not", "-", _DECODERS,
        "_code(function) in known[name]", "bool(known[name])",
        "tests/runtime/kernels/test_decoders.py::test_a_layer_with_other_code_is_not_exchanged",
    ),
    _mutant(
        "a layer in one call is not compared by its keys", "-", _DECODERS,
        "zip([self.compute(x, given), *_written(paging.plans[name], layer)], [own, *before], strict=True)",
        "[(self.compute(x, given), own)]",
        "tests/runtime/kernels/test_decoders.py::test_a_layer_that_computes_something_else_is_not_exchanged",
    ),
    _mutant(
        "what goes from layer to layer is rounded", "-", _DECODERS,
        "before.goes_on = kernel is not None", "before.goes_on = False",
        "tests/runtime/kernels/test_decoders.py::test_what_goes_from_layer_to_layer_is_not_rounded",
    ),
    _mutant(
        "a layer by its own code is given what is not rounded", "-", _DECODERS,
        "before.goes_on = kernel is not None", "before.goes_on = True",
        "tests/runtime/kernels/test_decoders.py::test_what_goes_from_layer_to_layer_is_not_rounded",
    ),
    _mutant(
        "logits are rounded", "-", "runtime/kernels/exchanges.py",
        "rounds=[*layers] != [head]", "rounds=True",
        "tests/runtime/kernels/test_exchanges.py::test_logits_are_not_rounded",
    ),
    _mutant(
        "on a GPU, tiles of keys begin where a window does", "-", _GPU_SPANS,
        "tl.maximum(span * STEP, first // KEYS * KEYS)", "tl.maximum(span * STEP, first)",
        _GPU_BITS + "test_attention_in_parts_beside_others_has_the_bits_of_a_prompt_alone",
    ),
    _mutant(
        "on a GPU, a part of a span is folded", "-", _GPU_SPANS,
        "runs_of(plan, members, bounds, SPAN)", "runs_of(plan, members, bounds, 1)",
        _GPU_BITS + "test_a_step_folds_whole_spans_and_merges_them_in_their_order",
    ),
    _mutant(
        "on a GPU, the last span is merged first", "-", _GPU_SPANS,
        "np.lexsort((begins[apart], rows[apart]))", "np.lexsort((-begins[apart], rows[apart]))",
        _GPU_BITS + "test_a_step_folds_whole_spans_and_merges_them_in_their_order",
    ),
    _mutant(
        "on a GPU, few rows are multiplied in other steps", "-", "runtime/kernels/triton_linear.py",
        "STEP=INPUTS,", "STEP=INPUTS if tile > 16 else INPUTS // 4,",
        _GPU_BITS + "test_a_row_has_the_same_bits_among_any_number_of_rows",
    ),
    _mutant(
        "an audit compares only the first layer", "-", _AUDIT,
        "np.array_equal(copy, right)", "np.array_equal(copy[: len(copy) // 4], right[: len(copy) // 4])",
        _AUDITED + "test_the_place_of_a_difference_is_logged",
    ),
    _mutant(
        "a mismatch of an audit is counted and not removed", "-", _AUDIT,
        "self._means.cache.remove(key, self._prefix.namespace)", "0",
        _AUDITED + "test_a_flipped_bit_is_found_and_removed_from_every_tier",
    ),
    _mutant(
        "an audit leaves what storage alone has after a page", "-", _AUDIT,
        "self._names[page:]", "self._names[page:page]",
        _AUDITED + "test_what_storage_alone_has_after_a_page_is_removed_with_it",
    ),
    _mutant(
        "what gave way to others in a step computes in it", "-", _SCHEDULER,
        "if pair[0].id in self._running and pair[0].id not in again] + admitted", "] + admitted",
        "tests/runtime/schedule/test_scheduler.py::test_with_its_share_it_is_still_the_first_to_give_way",
    ),
    _mutant(
        "an audit goes on while a request waits", "-", _SCHEDULER,
        "elif self._auditor is not None and not (self.busy or", "if self._auditor is not None and not (False and",
        _AUDITED + "test_a_request_that_arrives_during_an_audit_waits_for_one_chunk",
    ),
    _mutant(
        "a GPU merges partial results without their maximum", "-", _TRITON,
        "highest = tl.maximum(most, own)", "highest = tl.zeros_like(most)",
        "tests/runtime/attention/test_triton_attention.py::test_results_are_those_request_by_request",
    ),
    _mutant(
        "a GPU reads a shared run one page too far", "-", _TRITON,
        "tables[run.members[0]], begin, end)", "tables[run.members[0]], begin, end + size)",
        "tests/runtime/attention/test_triton_attention.py::test_results_are_those_request_by_request",
    ),
    _mutant(
        "a GPU reads a shared run one page short", "-", _TRITON,
        "tables[run.members[0]], begin, end)", "tables[run.members[0]], begin, end - size)",
        "tests/runtime/attention/test_triton_attention.py::test_results_are_those_request_by_request",
    ),
    _mutant(
        "a GPU gives a tile the keys of its first row only", "-", _TRITON,
        "np.maximum.reduceat(bounds[:, 1], first))", "bounds[first, 1])",
        "tests/runtime/attention/test_triton_attention.py::test_results_are_those_request_by_request",
    ),
    _mutant(
        "a GPU puts a result at the place of another row", "-", _TRITON,
        'np.argsort(rows, kind="stable")', "np.arange(len(rows))",
        "tests/runtime/attention/test_triton_attention.py::test_results_are_those_request_by_request",
    ),
    _mutant(
        "who fills a pool alone is said to be beyond a quota", "-", "cache/quotas.py",
        "most if share.maximum < 1 else _NO_LIMIT", "most",
        "tests/cache/test_explain.py::test_an_owner_without_a_maximum_is_never_beyond_it",
    ),
    _mutant(
        "what a client missed that left is in some metrics only", "-", "server/run.py",
        "            await self._see_the_end(index)\n", "",
        "tests/server/serve/test_serve_explain.py::test_what_a_client_missed_that_left_counts_everywhere",
    ),
    _mutant(
        "a recorded step writes keys of rows that have no request", "-", _TRITON,
        "constant_values=-1", "constant_values=0",
        "tests/runtime/kernels/test_step_graphs.py::test_recorded_steps_give_the_same_logits_and_keys",
    ),
    _mutant(
        "a recorded step keeps the requests that it was recorded with", "-", _TRITON,
        "self._memory.fill(tables.padded(self._sizes))\n        return True", "return True",
        "tests/runtime/kernels/test_step_graphs.py::test_recorded_steps_give_the_same_logits_and_keys",
    ),
    _mutant(
        "a recorded step is used though its logits differ", "-", "runtime/kernels/step_graphs.py",
        "if error <= self._limit:", "if True:",
        "tests/runtime/kernels/test_step_graphs.py::test_a_repeated_step_that_differs_is_not_used",
    ),
    _mutant(
        "a step is recorded while pages before it are on their way", "-", "runtime/segments.py",
        "self.adapter, self.arriving, self", "self.adapter, self",
        "tests/runtime/kernels/test_step_graphs.py::test_what_is_on_its_way_is_waited_for",
    ),
    _mutant(
        "a copy on a GPU leaves out the end of a row", "-", "runtime/kernels/triton_copies.py",
        "len(sources) * -(-words // WORDS)", "len(sources) * (words // WORDS)",
        "tests/runtime/kernels/test_triton_copies.py::test_it_copies_the_rows_that_are_asked_for",
    ),
    # ---------------------------------------------------------------- quantized weights
    _mutant(
        "a scale of codes has so many bits that its products are rounded", "-", "runtime/models/quantization.py",
        "scale = _rounded(scale, 20)", "scale = _rounded(scale, 24)",
        "tests/runtime/models/test_quantization.py::test_codes_and_weight_give_the_same_bits",
    ),
    _mutant(
        "a file's numbers of 4 bits are looked for without its zeros", "-", "runtime/models/quantization.py",
        "torch.where(numbers == 0, 0, wide", "torch.where(numbers == 1, 0, wide",
        "tests/runtime/models/test_quantization.py::test_numbers_of_a_file_of_4_bits_are_found_again_to_the_last_bit",
    ),
    _mutant(
        "more rows are computed from the weight before it was quantized", "-", "runtime/models/quantization.py",
        "part.copy_(fit.numbers(part.dtype).view_as(part))", "pass",
        "tests/runtime/models/test_quantization.py::test_every_number_of_rows_computes_with_the_same_weights",
    ),
    # ---------------------------------------------------------------- retention
    _mutant(
        "a time that runs out ends a pin", "-", _RETENTION,
        "elif not entry.pinned:", "else:", "advice",
    ),
    _mutant(
        "what has expired stays", "-", _RETENTION,
        "while self._times and self._times[0][0] <= self._now:", "while False:", "advice",
    ),
    _mutant(
        "a later, shorter time shortens a retention", "-", _RETENTION,
        "until, renew_s, pinned = max(until, old.until), max(", "renew_s, pinned = max(", "advice",
    ),
    _mutant(
        "one owner may retain what is left to all", "-", _RETENTION,
        "min(left, self._limit(quota, tier, row, share) - held[row])", "left", "advice",
    ),
    _mutant(
        "nothing is left to running requests", "-", _RETENTION,
        "min(left, self._limit(quota, tier, row, share)", "min(10**9, self._limit(quota, tier, row, share)",
        "tests/cache/policies/test_retention.py::test_owners_do_not_take_from_each_other_but_the_reserve_is_common",
    ),
    _mutant(
        "what does not fit on the host is let go on the device", "-", _RETENTION,
        "if below is None:\n            return\n", "if below is None:\n            return self._end(entry)\n",
        "advice",
    ),
    _mutant(
        "the beginning of a removed prefix is let go with its end", "-", _RETENTION,
        "if above else None", "if False else None",
        "tests/cache/policies/test_retention.py::test_a_removal_ends_a_retention_and_what_is_left_stays_retained",
    ),
    _mutant(
        "a hit renews what has expired", "-", _RETENTION,
        "entry.renew_s and entry.until > self._now:", "entry.renew_s:",
        "tests/cache/policies/test_retention.py::test_what_has_expired_is_not_renewed",
    ),
    _mutant(
        "a hit renews nothing", "-", _RETENTION,
        "entry.until = max(entry.until, self._now + entry.renew_s)", "pass",
        "tests/cache/policies/test_retention.py::test_a_hit_renews_what_it_has_all_of",
    ),
    _mutant(
        "a renewal is forgotten when the first time runs out", "-", _RETENTION,
        "                self._queue(entry)\n            elif", "                pass\n            elif",
        "tests/cache/policies/test_retention.py::test_a_hit_renews_what_it_has_all_of",
    ),
    _mutant(
        "a retention that moves down is counted on both tiers", "-", _RETENTION,
        "            return\n        self._drop(entry)\n", "            return\n", "advice",
    ),
    _mutant(
        "what nobody has asked for keeps the room that somebody asks for", "-", _RETENTION,
        "least = self._least(owner, terms)", "least = None",
        "tests/cache/policies/test_retention.py::test_what_is_asked_for_has_all_the_room_whatever_is_kept_beside",
    ),
    _mutant(
        "what one tenant asks for ends what others keep, whoever is in the way", "-", _RETENTION,
        "crowded = terms.worth == math.inf and any(", "crowded = terms.worth == math.inf or any(",
        "tests/cache/policies/test_retention.py::test_what_others_keep_gives_way_only_where_they_are_in_the_way",
    ),
    _mutant(
        "a retry of a session makes an anchor", "-", "runtime/hints/anchors.py",
        "return (0, parted) if known else (parted, 0)", "return (parted, 0)",
        "tests/runtime/hints/test_anchors.py::test_a_retry_of_a_session_is_none_until_it_goes_on_from_it",
    ),
    _mutant(
        "what goes on from a replaced prompt goes first with it", "-", "runtime/hints/replaced.py",
        "key + _NOBODYS * self._cache.page_size, 1", "key, 1",
        "tests/runtime/hints/test_replaced.py::test_what_goes_on_from_the_history_or_its_answer_stays",
    ),
    # ---------------------------------------------------------------- quotas
    _mutant(
        "what others are guaranteed is retained", "-", _RETENTION,
        "self._most[tier][row] - self._guaranteed[tier][row] -", "self._most[tier][row] -",
        "tests/cache/policies/test_quotas.py::test_retention_leaves_to_others_what_they_are_guaranteed",
    ),
    _mutant(
        "the host keeps what exceeds a maximum", "-", "tiers/host/tier.py",
        "while (over := self.tree.core.beyond_maximum(row, HOST))[1]:", "while (over := (b\"\", 0))[1]:", "quotas",
    ),
    _mutant(
        "the host makes room whatever is guaranteed", "-", "tiers/host/tier.py",
        "self.tree.evict_for(ns, missing,", "self.tree.evict_for(None, missing,",
        "tests/cache/policies/test_quotas.py::test_guarantees_hold_on_the_host",
    ),
    _mutant(
        "the end of a retention leaves what exceeds a maximum", "-", _RETENTION,
        "        if ended:\n            self._settle()\n", "",
        "tests/cache/policies/test_quotas.py::test_what_is_retained_is_evicted_beyond_the_maximum_when_its_time_is_up",
    ),
    _mutant(
        "what was behind removed pages stays beyond its owner's maximum", "-", "cache/prefix_cache.py",
        "        self._settle()  # what was removed", "        # what was removed",
        "tests/cache/policies/test_quotas.py::test_what_was_behind_removed_pages_goes_with_the_removal_that_frees_them",
    ),
    _mutant(
        "pages that become free keep what was in them", "-", "runtime/memory/pools.py",
        "        pool.freed_with(partial(pools.clear, name))", "        pass",
        "tests/cache/test_tenants.py::test_what_leaves_a_page_is_overwritten_where_that_is_asked_for",
    ),
    _mutant(
        "pages that become free keep their scores", "-", "runtime/memory/pools.py",
        "            cache.pool.freed_with(pools.scores.forget)", "            pass",
        "tests/runtime/sampling/test_kept_scores.py::test_a_model_forgets_scores_with_their_pages",
    ),
    _mutant(
        "scores are looked for before their pages have arrived", "-", "runtime/schedule/scheduler.py",
        "            load.wait()  # its pages", "            pass  # its pages",
        "tests/runtime/sampling/test_kept_scores.py::test_scores_follow_their_pages_through_the_tiers",
    ),
    _mutant(
        "the first token without a kept score gets none", "-", "runtime/schedule/sequence.py",
        "self.scored_from = first + len(self.scores) - 1", "self.scored_from = first + len(self.scores)",
        "tests/runtime/sampling/test_kept_scores.py::test_a_prompt_that_was_scored_is_found_with_its_scores",
    ),
    _mutant(
        "a public prefix goes to whoever begins like it", "-", "runtime/hints/public.py",
        "if key.symbols.startswith(prefix.tobytes()):", "if key.symbols[:8] == prefix.tobytes()[:8]:",
        "tests/runtime/hints/test_public_prefixes.py::test_nothing_is_copied_that_is_not_public_whole_and_begun_with",
    ),
    _mutant(
        "a tenant's request is matched in the public namespace", "-", "server/prompting.py",
        "tenant=None if tenant is None else tenant.hex()", "tenant=None",
        "tests/cache/test_tenants.py::test_keys_of_tenants_are_keys_of_the_server_and_keep_them_apart",
    ),
    # ---------------------------------------------------------------- sessions that are brought up ahead
    _mutant(
        "sessions that are brought up have no bound", "-", _SESSIONS,
        "min(self._most - sum(each.pages for each in self._known.values()), room())", "room()",
        "tests/runtime/hints/test_sessions.py::test_nothing_is_brought_up_beyond_the_share",
    ),
    _mutant(
        "a session takes the pages of running requests", "-", _SESSIONS,
        "for each in self._known.values()), room())", "for each in self._known.values()), 999)",
        "tests/runtime/hints/test_sessions.py::test_nothing_is_brought_up_where_a_request_may_need_the_pages",
    ),
    _mutant(
        "a session that was brought up in vain stays", "-", _SESSIONS,
        "self._cache.demote(session.tokens, session.namespace)", "pass",
        "tests/runtime/hints/test_sessions.py::test_a_session_that_does_not_come_goes_first",
    ),
    # ---------------------------------------------------------------- versions of the weights
    _mutant(
        "a namespace leaves out the version of the weights", "-", "cache/namespaces.py",
        'parts.append(_field(b"w", self.weights))', "pass", "weights",
    ),
    _mutant(
        "a version is named by its number", "-", _ENGINE_CORE,
        "self.scheduler.renew(new.digest, mode, lag)",
        "self.scheduler.renew(str(self.scheduler.versions.number), mode, lag)",
        _WEIGHED + "test_pages_in_storage_are_those_of_the_weights_that_computed_them",
    ),
    _mutant(
        "a digest leaves out the numbers", "-", "runtime/models/new_weights.py",
        "            hasher.update(part)\n", "",
        _WEIGHED + "test_pages_in_storage_are_those_of_the_weights_that_computed_them",
    ),
    _mutant(
        "a running request goes on with KV that may not be found any more", "-", _SCHEDULER,
        "if sequence.base in versions.older(sequence.request) and not sequence.loading:", "if not sequence.loading:",
        "weights",
    ),
    _mutant(
        "a waiting request stays in the namespace of older weights", "-", _SCHEDULER,
        "            sequence.move(request, versions.number, base)\n",
        "            sequence.move(sequence.request, versions.number, base)\n", "weights",
    ),
    _mutant(
        "a running request keeps what other weights compute for it", "-", _SEQUENCE,
        "            self._own = self.computed\n", "            pass\n", "weights",
    ),
    _mutant(
        "a request keeps what it computes on top of other weights' KV", "-", _SEQUENCE,
        "self._own: int | None = None if base == version else 0", "self._own: int | None = None", "weights",
    ),
    _mutant(
        "a waiting request keeps what it computes on top of other weights' KV", "-", _SEQUENCE,
        "self.version, self.base, self._own = version, base, None if base == version else 0",
        "self.version, self.base, self._own = version, base, None", "weights",
    ),
    _mutant(
        "a request that is computed again keeps what the first weights had computed", "-", _SEQUENCE,
        "self._own = None if self._own is None else 0  # it may be computed again", "pass", "weights",
    ),
    _mutant(
        "a lag is one version longer", "-", _VERSIONS,
        "self.number - number <= lag", "self.number - number <= lag + 1", "weights",
    ),
    _mutant(
        "groups outlive a strict update", "-", _VERSIONS,
        "            self._groups = OrderedDict.fromkeys(self._groups, self.number)\n", "            pass\n", "weights",
    ),
    _mutant(
        "a group finds each version with which a group began", "-", _VERSIONS,
        "        if not self._by_group:\n            return [*self._names][-2::-1]",
        "        if True:\n            return [*self._names][-2::-1]", "weights",
    ),
    _mutant(
        "scores are read of older weights", "-", _VERSIONS,
        "if request.params.reads_from is not None:", "if False:",
        _WEIGHED + "test_scores_are_never_of_older_weights",
    ),
    _mutant(
        "what older weights have computed stays", "-", _VERSIONS,
        "return self._cache.old_weights.keep(self.name, self.names)", "return 0",
        _WEIGHED + "test_nothing_of_older_weights_is_found_and_its_pages_are_free",
    ),
    _mutant(
        "an older version is not the first to be evicted", "-", "cache/old_weights.py",
        "                self._demote(name)\n", "                pass\n",
        "tests/cache/test_old_weights.py::test_what_older_weights_have_computed_goes_first",
    ),
    _mutant(
        "what was drawn before the weights changed is audited", "-", _SCHEDULER,
        "            self._auditor.forget()\n", "            pass\n",
        _WEIGHED + "test_an_audit_compares_only_what_the_same_weights_have_computed",
    ),
    _mutant(
        "tokens are counted for the version that is newest at their end", "-", _SEQUENCE,
        "weight_versions=tuple(self._generated.items()) or ((self.version, 0),)",
        "weight_versions=((self.version, self.generated),)",
        _WEIGHED + "test_a_request_that_runs_is_computed_anew_from_its_prompt_and_its_tokens",
    ),
    _mutant(
        "weights that do not fit are copied in part", "-", "runtime/models/new_weights.py",
        "    if missing := sorted(set(first.values()) - fitted.keys()):", "    if missing := [][:0]:",
        _WEIGHED + "test_weights_that_do_not_fit_change_nothing",
    ),
)

_CORE, POLICIES = "core/csrc/", "core/csrc/eviction/policies/"
_GHOSTS = _CORE + "tree/ghosts.cpp"
_OWNERS = _CORE + "residency/owners.h"
_SPANS, _LINEAR = _CORE + "kernels/spans.h", _CORE + "kernels/linear.cpp"
_ROWS_OF_PAGES = "tests/runtime/attention/test_page_attention.py::"
_LEASES, _GITTINS = "tests/cache/test_lease_components.py::", "tests/cache/policies/test_policies_gittins.py::"
_TAIL = "tests/cache/policies/test_policies_tail.py::"
NATIVE: tuple[Mutant, ...] = (
    _mutant(
        "a split leaves the host's pages with the lower half", "sglang#36696", _CORE + "residency/residency.cpp",
        "if (!low.absent()) up.ids = low.ids.take_front(",
        "if (!low.absent() && tier_of(column) == kDevice) up.ids = low.ids.take_front(",
    ),
    _mutant(
        "the upper half of a split is not locked", "sglang#28692", _CORE + "residency/residency.cpp",
        "      up.locks = low.locks;\n", "",
    ),
    _mutant(
        "the upper half of a split does not join the transfer", "sglang#29860", _CORE + "residency/residency.cpp",
        "      up.transfer = low.transfer;\n",
        "      up.transfer = low.absent() ? kNone : kHere;\n",
    ),
    _mutant(
        "what is locked is evicted", "sglang#27586", _CORE + "residency/residency.h",
        "return c.present() && c.locks == 0 &&", "return c.present() &&",
    ),
    _mutant(
        "a node is cut short though the host has it", "sglang#10637", _CORE + "tree/evict.cpp",
        "if (nodes_[node].branches == 0 && !cells_.pinned(node, tier) && cells_.only_on(node, tier)) {",
        "if (nodes_[node].branches == 0 && !cells_.pinned(node, tier)) {",
    ),
    _mutant(
        "a lease publishes without moving its lock", "vllm#37076", _CORE + "lease/lease.cpp",
        "  cache_.tree.move_lock(node_, added.node, kDevice);\n", "",
    ),
    _mutant(
        "what is in flight is matched", "vllm#45704", _CORE + "residency/residency.cpp",
        "for (; at < path.size() && cell(path[at].node, 0).present(); ++at)",
        "for (; at < path.size() && !cell(path[at].node, 0).absent(); ++at)",
        "tests/cache/test_tree.py::test_a_match_stops_before_pages_in_flight",
    ),
    _mutant(
        "the pages of a lease that ends while it is loaded are free at once", "TensorRT-LLM#15546",
        _CORE + "lease/lease.cpp",
        "  if (load_) {\n    cache_.abandon({node_, 0, host_node_, load_, std::move(held_), owned_});\n    return;\n",
        "  if (false) {\n    return;\n",
    ),
    # ---------------------------------------------------------------- windows and states
    _mutant(
        "a split gives the state to the upper half", "-", _CORE + "residency/residency.cpp",
        "      --cell(nodes_[upper].parent, column).holders;\n",
        "      std::swap(up.ids, low.ids);\n      std::swap(up.transfer, low.transfer);\n"
        "      up.holders = 0;\n",
        _LEASES + "test_a_split_leaves_the_state_with_the_lower_half",
    ),
    _mutant(
        "a lease locks its window from the root on", "-", _CORE + "residency/residency.h",
        "  const std::uint32_t first = first_locked(node, column);\n  for (; node != stop",
        "  const std::uint32_t first = 0;\n  for (; node != stop",
        _LEASES + "test_a_lease_that_runs_long_holds_a_window_of_pages",
    ),
    _mutant(
        "a lease does not lock its window", "-", _CORE + "residency/residency.h",
        "  const std::uint32_t first = first_locked(node, column);\n  for (; node != stop",
        "  const std::uint32_t first = component(column).begins_late() ? ~0u : 0;\n  for (; node != stop",
        _LEASES + "test_a_window_lock_goes_with_its_lease",
    ),
    _mutant(
        "a lock at the boundary of a chunk does not hold what is copied", "here", _CORE + "residency/component.h",
        "    const bool boundary = kind == Kind::chunked && position > 0",
        "    const bool boundary = false && position > 0",
        "tests/tiers/test_tiers_components.py::test_random_operations_leave_every_page_correct",
    ),
    _mutant(
        "a match inside a chunk goes on from pages that are not there", "-", _CORE + "residency/component.h",
        "    if (kind == Kind::chunked) return position - position % span;",
        "    if (kind == Kind::chunked) return position;",
        "tests/cache/test_components.py::test_a_match_ends_where_every_component_allows_it",
    ),
    _mutant(
        "a lease computes with the tree's own state", "-", _CORE + "lease/holding.cpp",
        "  slot = cache.allocate_slot(component);\n"
        "  if (lease.node()) cache.copy_state(state_at(cache, lease.node(), lease.owned()), slot);\n",
        "  slot = lease.node() ? state_at(cache, lease.node(), lease.owned()) : cache.allocate_slot(component);\n",
        _LEASES + "test_a_lease_computes_with_a_copy_of_the_state",
    ),
    _mutant(
        "a state that was put aside is lost with its lease", "-", _CORE + "lease/holding.cpp",
        "  cache.free(component, {&slot, 1});\n  cache.free(component, {&copy, 1});\n",
        "  cache.free(component, {&slot, 1});\n",
        _LEASES + "test_leases_do_as_the_model",
    ),
    _mutant(
        "a state that the tree has already is kept from all", "-", _CORE + "lease/holding.cpp",
        "  cache.publish(component, copy, !taken);\n",
        "  if (taken) cache.publish(component, copy, !taken);\n",
        _LEASES + "test_leases_do_as_the_model",
    ),
    _mutant(
        "a page inside the window is given back", "-", _CORE + "lease/lease.cpp",
        "cache_.row(own.component).first_read(begin);",
        "begin - std::min<std::uint64_t>(cache_.row(own.component).span / 2, begin);",
        _LEASES + "test_leases_do_as_the_model",
    ),
    # ---------------------------------------------------------------- windows and states from the host
    _mutant(
        "behind a load that failed the state is not what it was at the hit", "-", _CORE + "lease/holding.cpp",
        "  if (node) cache.copy_state(state_at(cache, node, owned), slot);\n", "",
        "tests/tiers/test_tiers_leases.py::test_a_failed_load_leaves_everything_as_it_was_at_the_hit",
    ),
    _mutant(
        "the state of a load is published as the forward has left it", "-", _CORE + "lease/lease.cpp",
        "  cache_.counters.host_hit += positions;\n",
        "  cache_.counters.host_hit += positions;\n"
        "  for (StateSlot& own : held_.states)\n"
        "    if (own.copy >= 0) cache_.copy_state(own.slot, own.copy);\n",
        "hybrid",
    ),
    _mutant(
        "the state of a load that failed is published", "-", _CORE + "lease/holding.cpp",
        "  cache.free(component, {&copy, 1});\n  copy = -1;\n  if (node)", "  if (node)",
        "tests/tiers/test_tiers_leases.py::test_a_failed_load_leaves_everything_as_it_was_at_the_hit",
    ),
    _mutant(
        "window pages of a load that failed are kept", "-", _CORE + "lease/lease.cpp",
        "    for (Sliding& own : held_.sliding)\n      own.revert_load(cache_, node_, owned_);\n", "",
        "hybrid",
    ),
    _mutant(
        "what the host has in part is loaded", "-", _CORE + "lease/lease.cpp",
        "if (held_.size() == 1 && held_.full) return true;", "return true;",
        "hybrid",
    ),
    _mutant(
        "where all layers slide, what the host has in part is loaded", "here", _CORE + "lease/lease.cpp",
        "if (held_.size() == 1 && held_.full) return true;", "if (held_.size() == 1) return true;",
        "tests/tiers/test_tiers_leases.py::test_a_window_that_lies_on_both_tiers_in_part_is_not_loaded",
    ),
    _mutant(
        "window pages that a load writes to are given back", "here", _CORE + "lease/lease.cpp",
        "if (!load_)\n      own.drop_before(", "own.drop_before(",
        "tests/tiers/test_tiers_leases.py::test_pages_on_their_way_stay_though_the_window_goes_on",
    ),
    _mutant(
        "a state is put aside where a load writes to", "here", _CORE + "lease/lease.cpp",
        "  require(!load_, \"position\", position, \"none while a state is in flight\");\n", "",
        "tests/tiers/test_tiers_leases.py::test_no_state_is_put_aside_while_one_is_on_its_way",
    ),
    _mutant(
        "a load leaves the first page of the window out", "-", _CORE + "lease/holding.cpp",
        "cache.row(component).first_needed(end, cache.tree.page_size()));",
        "cache.row(component).first_needed(end, cache.tree.page_size()) + !cache.row(component).leaf_only());",
        "hybrid",
    ),
    # ---------------------------------------------------------------- states and windows that others need
    _mutant(
        "a cap takes the state from which others part", "here", _CORE + "tree/evict.cpp",
        "const bool shared = std::exchange(forks, false) || nodes_[at].forked;", "const bool shared = false;",
        "tests/cache/test_components.py::test_a_cap_leaves_states_that_others_part_from",
    ),
    _mutant(
        "a state goes first though others part from it", "here", _CORE + "eviction/eviction.cpp",
        "  return nodes_[above].root() || nodes_[above].children() > 1 || nodes_[above].forked ? kNone : above;",
        "  return nodes_[above].root() ? kNone : above;",
        "tests/cache/test_components.py",
    ),
    _mutant(
        "pages in front of the window of an insertion go by their age", "here", _CORE + "eviction/eviction.cpp",
        "  return row.per_page() && nodes_[node].start < cells_.first_needed",
        "  return false && cells_.first_needed",
        "tests/cache/test_components.py::test_pages_before_the_windows_of_inserted_prefixes_are_evicted_first",
    ),
    _mutant(
        "with what is in front of a window the window goes", "here", _CORE + "eviction/eviction.cpp",
        "  return standing(node, column).worth && n.start < first ? first - n.start : n.pages;\n",
        "  return n.pages;\n",
        "tests/cache/test_components.py::test_pages_before_the_windows_of_inserted_prefixes_are_evicted_first",
    ),
    # ---------------------------------------------------------- what is removed, and what follows what is in flight
    _mutant(
        "ids of what hangs on a cancelled beginning come back while they are written to", "here",
        _CORE + "tree/transfer.cpp",
        "  detach(below, Why::unknown);  // nothing below can fail\n",
        "  detach(below, Why::unknown);\n"
        "  for (const Index at : below) {\n"
        "    const Run<std::int32_t> ids = vacate(at, cells_.column_of(0, tier));\n"
        "    freed[0].insert(freed[0].end(), ids.data(), ids.data() + ids.size());\n"
        "  }\n",
        "tests/cache/test_tree.py::test_pages_after_a_cancelled_transfer_are_freed_when_their_own_transfer_ends",
    ),
    _mutant(
        "a transfer locks what another has in flight", "here", _CORE + "tree/insert.cpp",
        "    if (cell(node, c).transfer == node && !others[c]) tree.lock_all(node, tier, +1);\n",
        "    if (cell(node, c).transfer == node) tree.lock_all(node, tier, +1);\n",
        "tests/cache/test_tree.py::test_a_transfer_that_adds_nothing_has_nothing_in_flight",
    ),
    _mutant(
        "a user's unlock lets go of what a removed node holds", "here", _CORE + "tree/lock.cpp",
        "  if (cells_.locks_taken(node, tier) == 0) throw NotLocked{handle};\n",
        "  if (!cells_.pinned(node, tier)) throw NotLocked{handle};\n",
        "tests/cache/test_stateful.py",
    ),
    _mutant(
        "the end of a lease is no use of its prefix", "here", _CORE + "lease/cache.cpp",
        "  tree.refresh_use(node, kDevice);\n", "",
        "tests/cache/test_cache.py::test_the_end_of_a_lease_is_a_use_but_not_a_hit",
    ),
    # ---------------------------------------------------------------- the policy that learns
    _mutant(
        "it goes on as it has learned, however much is lost against lru", "-", POLICIES + "gittins.h",
        "as_lru = !ripe_ || lost_ + shadow_.at_risk() > may_lose();", "as_lru = !ripe_;",
        _GITTINS + "test_it_is_never_far_below_lru",
    ),
    _mutant(
        "it goes by what it has hardly learned", "-", POLICIES + "gittins.h",
        "as_lru = !ripe_ || lost_", "as_lru = lost_",
        _GITTINS + "test_without_experience_it_evicts_what_lru_evicts",
    ),
    _mutant(
        "the end of a request that is used again is taken for one that never is", "-", POLICIES + "gittins.h",
        "  record.tail = record.covered = false;\n  follow", "  record.covered = false;\n  follow",
        _GITTINS + "test_it_closes_its_share_of_the_gap_to_the_optimum",
    ),
    _mutant(
        "what it gave up and lru still has is no risk", "-", POLICIES + "lru_shadow.h",
        "    if (time >= edge_) at_risk_ += slot.chance * static_cast<double>(pages);\n", "",
        _GITTINS + "test_it_is_never_far_below_lru_when_the_workload_changes",
    ),
    _mutant(
        "nothing is known of what was evicted", "-", POLICIES + "gittins.h",
        "      evicted_.add(entry, limit);\n", "",
        _GITTINS + "test_it_is_never_far_below_lru",
    ),
    # ---------------------------------------------------------------- the policy that cuts ends
    _mutant(
        "a session that is found whole would have lost nothing", "-", POLICIES + "tail.h",
        "    if (rest.empty()) returned_ += at_leaf;\n", "",
        _TAIL + "test_it_is_never_far_below_lru",
    ),
    _mutant(
        "the beginning of a session goes with its end", "-", POLICIES + "tail.h",
        "return endings_.contains(victim) ? ending_pages() - lost(victim) : Remembering::at_once(victim);",
        "return Remembering::at_once(victim);",
        _TAIL + "test_of_sessions_in_turns_each_loses_its_end_where_lru_loses_all",
    ),
    # ---------------------------------------------------------------- events
    _mutant(
        "pages that are removed while they are in use stay listed", "-", "core/csrc/tree/shape.cpp",
        "      note_leaving(at);\n", "",
    ),
    _mutant(
        "pages that are cut off the end of a node stay listed", "-", "core/csrc/tree/evict.cpp",
        "        journal_->left(node, column, IdSpan((*freed)[c]).last(pages));\n", "        (void)0;\n",
    ),
    _mutant(
        "pages are listed while they are in flight", "-", "core/csrc/tree/journal.cpp",
        "  if (cell.present()) arrived(node, column);\n", "  arrived(node, column);\n",
    ),
    _mutant(
        "removed pages are listed when their copy arrives", "-", "core/csrc/tree/journal.cpp",
        "  if (!concerns(column) || n.removed) return;\n", "  if (!concerns(column)) return;\n",
    ),
    _mutant(
        "children are told before the parents that came with them", "-", "core/csrc/tree/journal.cpp",
        "return a.start < b.start; });", "return a.start > b.start; });",
    ),
    _mutant(
        "after a loss, what follows is noted as if nothing were missing", "-", "core/csrc/tree/journal.cpp",
        "  lost_ = true;\n", "",
    ),
    _mutant(
        "what pages in storage continue is never told", "-", "core/csrc/tree/journal.cpp",
        "if (below && start > nodes_[above].start &&", "if (false && start > nodes_[above].start &&",
        "tests/events/test_events_source.py::test_what_continues_pages_that_are_nowhere_keeps_its_place",
    ),
    # ---------------------------------------------------------------- attention over pages
    _mutant(
        "spans of a query are merged without their highest scores", "-", _SPANS,
        "const float weight = power_of_two<kLanes>(added.highest - highest);", "const float weight = 1;",
        _ROWS_OF_PAGES + "test_long_parts_are_computed_in_several_units",
    ),
    _mutant(
        "what was added before a higher score stays as heavy", "-", _SPANS,
        "const float kept = power_of_two<kLanes>(before - highest);", "const float kept = 1;",
        _ROWS_OF_PAGES + "test_long_parts_are_computed_in_several_units",
    ),
    _mutant(
        "a query sees one key too many", "-", _SPANS,
        "after < static_cast<std::uint32_t>(seen.end - seen.begin)",
        "after <= static_cast<std::uint32_t>(seen.end - seen.begin)",
        _ROWS_OF_PAGES + "test_results_are_those_request_by_request",
    ),
    _mutant(
        "a sink has no weight", "-", _SPANS,
        "return scores.sinks ? Sum{1, ", "return scores.sinks ? Sum{0, ",
        _ROWS_OF_PAGES + "test_results_are_those_request_by_request",
    ),
    _mutant(
        "a span begins where the keys do", "-", _SPANS,
        "std::int32_t span = begin / kSpan * kSpan;", "std::int32_t span = begin;",
        _ROWS_OF_PAGES + "test_a_row_is_the_same_bits_whatever_is_computed_beside_it",
    ),
    _mutant(
        "all groups of a quantized weight have the scale of the first", "-", _LINEAR,
        "const float* const given = scales + i / kGroup * kScales;", "const float* const given = scales;",
        "tests/runtime/models/test_quantization.py::test_codes_and_weight_give_the_same_bits",
    ),
    _mutant(
        "numbers of codes are not rounded to bfloat16", "-", _LINEAR,
        "return nearest_bfloat16<kLanes>(found);", "return found;",
        "tests/runtime/models/test_quantization.py::test_every_code_is_the_number_of_the_weight",
    ),
    _mutant(
        "one row more is computed from codes of 4 bits", "-", _LINEAR,
        "kPackedRows = 7;", "kPackedRows = 8;",
        "tests/runtime/models/test_quantization.py::test_fewer_than_eight_rows_read_the_codes_and_more_the_weight",
    ),
    _mutant(
        "from 17 rows on sums have another order", "here", _LINEAR,
        "  for (std::size_t i = 0; i < x.inputs; i += kStep) {\n    Next w[kN];",
        "  for (std::size_t n = 0; n < x.inputs; n += kStep) {\n"
        "    const std::size_t i = x.count < 17 ? n : x.inputs - kStep - n;\n    Next w[kN];",
        "tests/runtime/kernels/test_kernels.py::test_sums_that_cancel_show_any_other_order",
    ),
    _mutant(
        "a sum is rounded before its bias is added", "-", _LINEAR,
        "totals_of<kLanes, kN>(total[m]) + bias",
        "rounded<4, typename Form::Number>(totals_of<kLanes, kN>(total[m])) + bias",
        "tests/runtime/kernels/test_kernels.py::test_sums_that_are_not_rounded_are_those_that_are",
    ),
    _mutant(
        "an activation is rounded before it multiplies", "-", _CORE + "kernels/decoder.cpp",
        "active * load_floats<kLanes>(y + i)", "rounded<kLanes, Number>(active) * load_floats<kLanes>(y + i)",
        "tests/runtime/kernels/test_decoders.py::test_a_whole_layer_rounds_what_multiplies_and_nothing_else",
    ),
    _mutant(
        "a key is rounded before it is rotated", "-", _CORE + "kernels/decoder.cpp",
        "store<kLanes>(out + i, load_floats<kLanes>(cosines + i) * low",
        "store<kLanes>(out + i, load_floats<kLanes>(cosines + i) * rounded<kLanes, Number>(low)",
        "tests/runtime/kernels/test_decoders.py::test_keys_are_rounded_when_they_are_rotated_and_values_once",
    ),
    # ---------------------------------------------------------------- advice
    _mutant(
        "the beginning of a node that is split is retained no longer", "-", _CORE + "residency/residency.cpp",
        "retained_[std::size_t{upper} * columns + column] = retained_[", "(void)retained_[", "advice",
    ),
    _mutant(
        "pages that several retentions keep count for each", "-", _CORE + "residency/residency.cpp",
        "if (std::max(times, times + by) == 1) alone[c]", "alone[c]",
        "tests/cache/policies/test_retention.py::test_pages_that_several_retentions_share_count_once",
    ),
    _mutant(
        "a demoted prefix stays so when it is used", "-", _CORE + "eviction/eviction.cpp",
        "    n.demoted = 0;\n    if (expected_)", "    if (expected_)",
        "tests/cache/policies/test_retention.py::test_a_use_that_computes_nothing_ends_it_too",
    ),
    _mutant(
        "what others share is demoted with a prefix", "-", _CORE + "tree/advice.cpp",
        "    if (nodes_[at].children() != 1) break;\n", "",
        "tests/cache/policies/test_retention.py::test_the_end_of_a_session_ends_its_retentions_not_those_of_what_it_shares",
    ),
    # ---------------------------------------------------------------- quotas
    _mutant(
        "nothing is guaranteed", "-", _OWNERS,
        "return beyond(counts(owner, column).present, share(owner, column).guaranteed);",
        "return counts(owner, column).present;", "quotas",
    ),
    _mutant(
        "more is evicted at once than exceeds a guarantee", "-", _CORE + "eviction/share_order.h",
        "spare ? std::min(want, spare) : want;", "want;", "quotas",
    ),
    _mutant(
        "who has more than its maximum keeps it when its request ends", "-", _CORE + "lease/lease.cpp",
        "  cache_.end(node_, held_, owned_);\n  cache_.settle();\n", "  cache_.end(node_, held_, owned_);\n", "quotas",
    ),
    _mutant(
        "what a copy held stays beyond its owner's maximum when room was made", "here", _CORE + "lease/cache.cpp",
        "  settle();  // with", "  // with",
        "tests/cache/policies/test_quotas.py::test_what_a_copy_held_beyond_a_maximum_goes_with_the_eviction_that_waited_for_it",
    ),
    _mutant(
        "each component is settled once", "here", _CORE + "lease/cache.cpp",
        "freed = freed || free_ids(c) > free;", "",
        "tests/cache/policies/test_quotas.py::test_what_a_copy_held_goes_when_the_eviction_of_another_component_waited_for_it",
    ),
    _mutant(
        "an owner at its maximum takes from others", "-", _CORE + "eviction/share_order.h",
        "(own != kNone && owners().beyond_maximum(asker, column, want))", "false",
        "tests/cache/policies/test_quotas.py::test_an_owner_at_its_maximum_makes_room_itself",
    ),
    _mutant(
        "what was removed is guaranteed to its owner", "-", _CORE + "tree/shape.cpp",
        "if (cells_.owners()) disown(at);", "",
        "tests/cache/policies/test_quotas.py::test_what_is_removed_is_guaranteed_to_nobody",
    ),
    _mutant(
        "the upper half of a split is nobody's", "-", _CORE + "residency/residency.cpp",
        "owners_->own(upper, owners_->of(lower))", "owners_->own(upper, kNoOwner)", "quotas",
    ),
    _mutant(
        "what an owner had is not counted when it goes", "-", _OWNERS,
        "spare_[column] += yields(owner, column) - before;", "spare_[column] += yields(owner, column);", "quotas",
    ),
    # ---------------------------------------------------------------- expected uses
    _mutant(
        "what a child's users expect does not hold for its parent", "-", _CORE + "eviction/lookahead.cpp",
        "  all_->pass_up(node, order_.nodes_[node].parent);\n", "",
        "tests/cache/policies/test_expected.py::test_what_goes_tells_the_page_before_it",
    ),
    _mutant(
        "a use does not end what was said", "-", _CORE + "eviction/expected.h",
        "all_[node].said && all_[node].since >= nodes_[node].accessed", "all_[node].said",
        "tests/cache/policies/test_expected.py::test_what_is_said_during_a_use_ends_with_it",
    ),
    _mutant(
        "what one user expects holds for what others share", "-", _CORE + "eviction/expected.h",
        " || nodes_[parent].hits > nodes_[child].hits + 1", "",
        "tests/cache/policies/test_expected.py::test_shared_beginnings_do_not_go_with_one_of_their_users",
    ),
    _mutant(
        "what is late is spared for ever", "-", _CORE + "eviction/expected.h",
        "all_[node].until = due + std::max(due - now_, 0.0);", "all_[node].until = due + 1e9;",
        "tests/cache/policies/test_expected.py::test_what_is_late_is_the_policys_again_after_as_long",
    ),
    _mutant(
        "who has asked for nothing is believed", "-", _CORE + "eviction/expected.h",
        "const double left = (allowance(a) - a.lost) / chance(a);",
        "const double left = 100 + (allowance(a) - a.lost) / chance(a);",
        "tests/cache/test_stateful.py::test_the_cache_does_as_the_reference",
    ),
    _mutant(
        "bets that are lost do not count", "-", _CORE + "eviction/expected.h",
        "    settle(entry, weight);", "    settle(entry, 0);",
        "tests/cache/policies/test_expected.py::test_advice_evicts_no_more_pages_than_its_owner_may_lose",
    ),
    _mutant(
        "a page more than the stake goes at once", "-", _CORE + "eviction/expected.h",
        "node == wager ? stake :", "node == wager ? stake + 1000 :",
        "tests/cache/policies/test_expected.py::test_advice_evicts_no_more_pages_than_its_owner_may_lose",
    ),
    # ---------------------------------------------------------------- the index of a router
    _mutant(
        "a page that was removed still counts", "-", _CORE + "routing/index.cpp",
        "    unset(at, medium, worker);\n    unexpect(&of, worker, at);", "    unexpect(&of, worker, at);",
        "tests/fleet/test_fleet_routing.py::test_a_page_that_was_removed_does_not_count",
    ),
    _mutant(
        "what one worker removes, all have lost", "-", _CORE + "routing/index.cpp",
        "[worker / 64] &= ~(std::uint64_t{1} << worker % 64);\n}\n\nBlockIndex", "[worker / 64] = 0;\n}\n\nBlockIndex",
        "tests/fleet/test_fleet_routing.py::test_a_page_that_was_removed_does_not_count",
    ),
    _mutant(
        "the index of a router leaves out the namespace", "-", _CORE + "routing/index.cpp",
        "SipHash::of(key_, Digest{}, name.data(), name.size())", "SipHash::of(key_, Digest{}, name.data(), 0)",
        "tests/fleet/test_fleet_routing.py::test_namespaces_never_cross",
    ),
    _mutant(
        "the index of a router has no bound", "-", _CORE + "routing/index.cpp",
        "while (pairs_ > capacity_) {", "while (pairs_ > capacity_ + 1000) {",
        "tests/fleet/test_fleet_routing.py::test_a_full_index_forgets_and_finds_no_more_than_there_is",
    ),
    _mutant(
        "a page is found in a block that is free", "-", _CORE + "routing/index.cpp",
        "  block(at).digest = {};  // no page is found in a block that is free\n", "",
        "tests/fleet/test_fleet_routing.py::test_a_page_is_found_where_it_is_now_and_not_where_it_was",
    ),
    _mutant(
        "the name of a page leaves out its number", "-", _CORE + "routing/prefixes.cpp",
        "state.take(Word{(pages.first + kLane)...});", "state.take(Word{(pages.first - pages.first + 0 * kLane)...});",
        "tests/fleet/test_fleet_routing.py::test_the_same_pages_in_another_order_are_another_prefix",
    ),
    _mutant(
        "a router does not see queues", "-", _CORE + "routing/ranking.cpp",
        "std::max(0.0, of.free_s - now_s) + one.service_s", "one.service_s",
        "tests/fleet/test_fleet_routing.py::test_one_with_much_more_to_do_is_passed_over",
    ),
    # ---------------------------------------------------------------- explanations
    _mutant(
        "what was forgotten is called never seen", "-", _GHOSTS,
        " || (found[page].kind == Known::never && may_have_been(space, hashes, page))", "", "explain",
    ),
    _mutant(
        "a namespace sees what another has evicted", "-", _GHOSTS,
        "(ns.data()), ns.size()) | 1;", "(ns.data()), 0) | 1;", "explain",
    ),
    _mutant(
        "an eviction of the host counts as one of the device", "-", _CORE + "tree/evict.cpp",
        "ghosts_->expect(reason(node, column, owner, want - asked.size()), tier);",
        "ghosts_->expect(reason(node, column, owner, want - asked.size()), kDevice);", "explain",
    ),
    _mutant(
        "a stack distance leaves out the page itself", "-", _CORE + "tree/explain.cpp",
        "std::min(pages, run.end - start)", "std::min(pages, run.end - 1 - start)", "explain",
    ),
    _mutant(
        "what came back counts twice in a stack distance", "-", _GHOSTS,
        "seen.insert(name = after(name, page_of(n, page)));", "name = after(name, page_of(n, page));", "explain",
    ),
    _mutant(
        "what was evicted again is said to have gone the first time", "-", _GHOSTS,
        "if (number > found[page].number)", "if (!found[page].number || number < found[page].number)", "explain",
    ),
    _mutant(
        "what was removed is called never seen", "-", _CORE + "tree/shape.cpp",
        "  if (ghosts_) ghosts_->removed(tops, why, eviction_.tick());\n", "", "explain",
    ),
    _mutant(
        "a join forgets where an end is", "-", _CORE + "tree/shape.cpp",
        "    ghosts_->joined(upper, lower);\n", "    {}\n", "explain",
    ),
    _mutant(
        "a page was evicted, whatever is above it", "-", _GHOSTS,
        "if (page == 0) return Leads::yes;", "if (page < 1u << 31) return Leads::yes;",
        "tests/cache/test_explain.py::test_a_page_was_evicted_only_after_all_pages_above",
    ),
    _mutant(
        "what is cut off does not know where it was", "-", _GHOSTS,
        "leave(node, pages, nodes_.next_identity(node),", "leave(node, pages, 0,", "explain",
    ),
    _mutant(
        "of a long prompt only the beginning is forgotten", "-", _GHOSTS,
        "next = std::min(end, ((ghost.start + at) / together + 1) * together - ghost.start);", "next = end;",
        "tests/cache/test_explain.py::test_long_prompts_are_forgotten_page_by_page",
    ),
    _mutant(
        "what is forgotten is not told from what begins alike, though somebody asks", "-", _GHOSTS,
        "first_ < indexed_ ? 1 : kTogether", "kTogether",
        "tests/cache/test_explain.py::test_what_follows_a_forgotten_page_is_new_if_somebody_asked_in_time",
    ),
    _mutant(
        "symbols beyond the end of the ring are not kept", "-", _GHOSTS,
        "(ghost.pages - before_end) * place_bytes_", "0", "explain",
    ),
    _mutant(
        "old evictions of a page that are passed over count as none", "-", _GHOSTS,
        "page >= clear && found[page].number <= passed_over", "false",
        "tests/cache/test_explain.py::test_what_went_before_many_evictions_of_its_first_page_is_forgotten",
    ),
)
# fmt: on
