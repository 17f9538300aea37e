"""Faults to plant, each with the tests that are to notice. `anchors.py` finds their places."""

from typing import NamedTuple

SCRIPTS = ("tests/test_shadow_engine.py::test_random_scripts",)
MANAGER = ("tests/blocks/test_kv_manager.py", "-k", "not every_row_read")
ISOLATION = ("tests/test_isolation.py",)
READERS = ("tests/traces/test_keys.py",)
ORDER = ("tests/traces/test_order.py",)
MEDIA = ("tests/traces/test_media.py",)
EMPTY = ("tests/traces/test_empty_prompts.py",)
MASKS = ("tests/kernels/test_transformers_masks.py",)
UNSEEN = ("tests/kernels/test_unseen.py",)
INTERRUPTIONS = ("tests/experiments/test_interruptions.py",)
STEPPING = ("tests/kernels/test_stepping.py",)
TABLES = ("tests/integrations/test_tables.py",)
HYBRID = ("tests/blocks/test_hybrid_oracle.py", "-k", "not thousand")
INTERRUPTED = ("tests/kernels/test_planner.py", "tests/engine/test_tree_plans.py", "-k", "interrupted")
GROUPED = ("tests/cache/test_grouped.py", "tests/blocks/test_grouped_manager.py")


class Fault(NamedTuple):
    """One rule broken.

    Attributes:
        at: the function or class by its qualified name, as in "Class.method" or "function.inner". Where the piece
            stands in several of one name, "module:function" tells which; "module:" is the whole module. The module is
            named without its folder.
        find: a Python expression, or consecutive statements, that stand there exactly once, in whatever layout.
        replace: what stands there instead; "" is `pass`.
    """

    name: str
    at: str
    find: str
    replace: str
    tests: tuple[str, ...] = SCRIPTS


FAULTS = [
    # ---- matching
    Fault("a match is not pinned", "RadixCache.acquire", "tree.pin(node)", ""),
    Fault("the source of a copy is not pinned", "RadixCache.acquire", "tree.pin(source)", ""),
    Fault("a pinned leaf stays in the order of eviction", "RadixTree.pin", "self.dequeue(node)", ""),
    Fault("a release does not unpin", "RadixCache._end", "self.tree.unpin(node, last_use=last_use)", ""),
    Fault(
        "off by one: the last token is matched too",
        "KVManager.begin",
        "packed[:-TOKEN_BYTES]",
        "packed",
        ("tests/blocks/test_kv_manager.py::test_at_least_one_token_is_computed",),
    ),
    Fault(
        "what this very step computes is copied from",
        "Node.is_computed",
        "self.num_uncommitted < self.num_blocks",
        "True",
    ),
    Fault(
        "what a step may not compute is published",
        "SequenceTables.allocate",
        "self._unpublished[name] = num_computed",
        "self._publish(held, num_computed)",
        TABLES,
    ),
    Fault(
        "a worker's block table is not append-only",
        "SequenceTables._publish",
        "self.manager.publish(sequence, held.span(start, end), start=start, keep_own=True)",
        "self.manager.publish(sequence, held.span(start, end), start=start)",
        TABLES,
    ),
    Fault("what runs is found a step late", "SequenceTables.look_up", "self._publish_running()", "", TABLES),
    Fault(
        "a look-up that is not admitted stays pinned",
        "SequenceTables.end_step",
        "for name in list(self._pending):\n    self._cancel(name)",
        "",
        TABLES,
    ),
    Fault(
        "tokens that were taken back stay packed",
        "SequenceTables.rewind",
        "del held.packed[num_tokens * TOKEN_BYTES :]",
        "",
        TABLES,
    ),
    Fault("what is kept apart is published", "SequenceTables.keep_apart", "held.is_published = False", "", TABLES),
    Fault(
        "a count is told before a partial match is given up",
        "SequenceTables.look_up",
        "self.manager.fits(held.sequence, len(tokens), spare=spare)",
        "",
        TABLES,
    ),
    Fault(
        "a duplicate that is kept is freed",
        "KVManager.publish",
        "keep_own and num_duplicates",
        "False",
        MANAGER,
    ),
    Fault(
        "what was kept is not freed at the end",
        "KVManager._free_own",
        "for own in sequence.kept:\n    self.allocator.free(own)",
        "",
        MANAGER,
    ),
    Fault(
        "a partial match is given up after its count was told",
        "KVManager.fits",
        "self.give_up_partial(sequence)",
        "",
        MANAGER,
    ),
    Fault(
        "an advance keeps the partial match behind it",
        "KVManager.advance",
        "self._drop_partial(sequence, first)",
        "",
        MANAGER,
    ),
    # ---- tails
    Fault(
        "the wrong block is kept as the partial one",
        "KVManager.end",
        "sequence.block_table[leased]",
        "sequence.block_table[-1]",
        ("tests/blocks/test_kv_manager.py", "-k", "to_spare"),
    ),
    Fault(
        "a tail with a token that was never computed",
        "Scheduler._release",
        "max(running.num_computed - first, 0)",
        "max(sequence.num_tokens - first, 0)",
        ("tests/scheduling/test_scheduler.py", "-k", "but_for_its_last_token"),
    ),
    Fault(
        "a fuller block does not replace a partial block",
        "RadixTree.append",
        "if node.children:\n    self._replace_partial_block(node.partial_block_before(span))",
        "",
    ),
    # ---- models of several groups
    Fault(
        "a block that is hit inside is not copied",
        "GroupedKVManager._copy_of",
        "if not sequence.num_passes:\n    return block",
        "",
        GROUPED,
    ),
    Fault(
        "a kept state is written over",
        "GroupedKVManager._copy_of",
        "is_state and block in self.cache",
        "False",
        GROUPED,
    ),
    Fault(
        "a state stays under the block that is written on",
        "GroupedKVManager._grow",
        "self.cache.move(group, source, copy)",
        "",
        GROUPED,
    ),
    Fault("an evicted block keeps its hashes", "GroupedKVManager._take", "self.cache.forget(evicted)", "", GROUPED),
    Fault(
        "a block without a hash waits to be evicted",
        "GroupedKVManager._release",
        "self._queue.remove(unhashed)",
        "unhashed = []",
        GROUPED,
    ),
    Fault(
        "the state of two passes ago is never given back",
        "GroupedKVManager._drop_passed",
        "previous is not None and previous < -(-computed // block) - 1",
        "False",
        GROUPED,
    ),
    Fault(
        "a state of one group is taken for all",
        "GroupedHashCache._last_state",
        "all(state in has for has in held)",
        "any(state in has for has in held)",
        GROUPED,
    ),
    Fault(
        "a junction leaves no state",
        "GroupedHashCache.publish",
        "end in (last, last // block * block, junction // block * block)",
        "end in (last, last // block * block)",
        GROUPED,
    ),
    Fault(
        "what one kind of layer cuts off is not looked at by the others",
        "GroupedHashCache.match",
        "hit in (before, 0)",
        "True",
        GROUPED,
    ),
    # ---- namespaces
    Fault(
        "a namespace is dropped at admission",
        "KVManager.begin",
        "self.cache.acquire(packed[:-TOKEN_BYTES] if match else b'', namespace)",
        "self.cache.acquire(packed[:-TOKEN_BYTES], None)",
    ),
    Fault(
        "a namespace is dropped when publishing",
        "RadixCache._key",
        "key = self._interner.mark(key, lease.namespace, lease.num_tokens, add=add)",
        "",
    ),
    Fault("the type of a namespace is forgotten", "Interner.mark", "replace(part, start=0)", "repr(part)[-4:]"),
    Fault(
        "all of a namespace but its first part is ignored", "Interner.mark", "parts(namespace)", "parts(namespace)[:1]"
    ),
    # ---- steps
    Fault(
        "what a failed step published stays",
        "RadixCache.withdraw",
        "blocks = _joined(self.tree.withdraw())",
        "self.commit()\nreturn NO_BLOCKS",
    ),
    Fault("a failed step does not cut leases back", "RadixCache.withdraw", "self._cut_back(lease)", ""),
    Fault("a failed step loses a sequence's own blocks", "KVManager.withdraw", "log.kept(leased)", "NO_BLOCKS"),
    Fault(
        "a failed step frees nothing that it took", "KVManager.withdraw", "self.allocator.free(log.to_free(leased))", ""
    ),
    Fault("a duplicate's own block is never freed", "KVManager.commit", "self._step.values()", "()"),
    Fault(
        "a fork copies a row too few",
        "KVManager.fork",
        "len(packed) // TOKEN_BYTES - i * self.cache.block_size",
        "len(packed) // TOKEN_BYTES - i * self.cache.block_size - 1",
    ),
    Fault("sequences that fail alone are not withdrawn", "Engine._run_apart", "self.scheduler.withdraw()", ""),
    # ---- scheduling
    Fault(
        "a sequence of this step is preempted",
        "Scheduler.victim",
        "[other for other in later if other.step != self._step]",
        "list(later)",
    ),
    Fault(
        "a preempted sequence believes its KV is there",
        "Scheduler._match",
        "RunningSequence(sequence, blocks)",
        "RunningSequence(sequence, blocks, sequence.num_tokens - 1 if sequence.num_preemptions else 0)",
    ),
    Fault(
        "the KV of a decoded token is not written",
        "Scheduler._schedule_decodes",
        "start if end % stride else self._publish(running, start, end)",
        "end if end % stride else self._publish(running, start, end)",
    ),
    Fault(
        "a block of the cache is written again",
        "Scheduler._publish",
        "first + self.manager.publish(blocks, running.sequence.packed(first, end), start=first)",
        "0 * self.manager.publish(blocks, running.sequence.packed(first, end), start=first)",
    ),
    Fault(
        "a step counts as computed before it has run",
        "Scheduler._schedule_chunk",
        "running.step, running.target = self._step, end",
        "running.step, running.target = self._step, end\nrunning.num_computed = end",
    ),
    # ---- resets
    Fault(
        "a lease from before a reset publishes after it (radix)",
        "RadixCache.reset",
        "not concerned.isdisjoint(kinds(lease.namespace))",
        "not concerned.isdisjoint(kinds(lease.namespace)) and False",
    ),
    Fault(
        "a lease from before a reset publishes after it (flat)",
        "FlatHashCache.reset",
        "not concerned.isdisjoint(kinds(lease.namespace))",
        "not concerned.isdisjoint(kinds(lease.namespace)) and False",
    ),
    Fault("a fork of a stale sequence publishes", "KVManager.fork", "lease.is_stale = is_stale", "", ISOLATION),
    Fault(
        "what was removed becomes evictable",
        "RadixTree.unpin",
        "self.dead_blocks += unpack(node.blocks).tolist()\nself._detach(node)",
        "self.queue(node)",
    ),
    Fault(
        "a tenant's blocks survive its reset (flat)",
        "FlatHashCache.insert",
        "self._parts_of.keep(ids, cursor.parts, len(cursor.blocks))",
        "",
    ),
    # ---- the flat hash
    Fault(
        "a hash without what came before",
        "FlatHashCache._hashes",
        "self._map.hash_of[cursor.blocks[-1]] if cursor.blocks else self._hasher.seed",
        "self._hasher.seed",
    ),
    Fault(
        "colliding hashes are believed",
        "BlockContents.verify",
        "(b for b in block_map.all(block_hash) if self[b].follows(parent, tokens, keys))",
        "(b for b in block_map.all(block_hash))",
    ),
    # ---- the engine
    Fault(
        "an abort ends a later request of that id",
        "Engine._take_in",
        "self.generations.get(request_id) is self._aborting[0]",
        "self.generations.get(request_id) is not None",
        ("tests/test_fault_injection.py::test_an_abort_that_comes_too_late",),
    ),
    Fault(
        "a number that is drawn again is another one",
        "RandomNumbers.__getitem__",
        "i != self._next",
        "self._next is None",
        ("tests/test_fault_injection.py", "-k", "sampling_that_fails or while_sampling"),
    ),
    Fault(
        "what was interrupted goes on half done",
        "Engine._transact",
        "if not self._is_whole:\n    self._begin_anew()\nraise",
        "self._is_whole = True\nraise",
        ("tests/test_shadow_engine.py::test_random_scripts_interrupted_at_random_lines",),
    ),
    Fault(
        "beginning anew forgets the tokens that were sampled",
        "Scheduler.restart",
        "for token_id in token_ids:\n    self.append_token(sequence, token_id)",
        "",
        ("tests/test_shadow_engine.py::test_random_scripts_interrupted_at_random_lines",),
    ),
    Fault(
        "beginning anew keeps what was cached",
        "KVManager.clear",
        "self.cache.clear()",
        "",
        ("tests/test_shadow_engine.py::test_random_scripts_interrupted_at_random_lines",),
    ),
    Fault(
        "signals come between lines that belong together",
        "HeldSignals._arrived",
        "self._is_open",
        "True",
        ("tests/engine/test_held_signals.py",),
    ),
    Fault(
        "generate that is left goes on",
        "Engine.generate",
        "self._abort(generations)",
        "",
        ("tests/engine/test_held_signals.py",),
    ),
    Fault(
        "an abort is taken out of its queue first",
        "Engine._take_in",
        """
            if self.generations.get(request_id) is self._aborting[0]:
                self._end_all(request_id, "abort")
            self._aborting.popleft()
        """,
        """
            if self.generations.get(request_id) is self._aborting[0]:
                self._aborting.popleft()
                self._end_all(request_id, "abort")
        """,
        ("tests/test_fault_injection.py", "-k", "interrupted_abort"),
    ),
    Fault(
        "a fork counts as computed before its copies have run",
        "Scheduler.fork",
        "return (other, copies)",
        "self.copied(other)\nreturn (other, copies)",
        ("tests/scheduling/test_scheduler.py", "-k", "once_its_copies"),
    ),
    Fault(
        "a cache serves two managers",
        "KVManager.__init__",
        'take_over(cache, "cache", self)',
        "",
        ("tests/engine/test_engine.py", "-k", "one_owner"),
    ),
    Fault(
        "an engine takes any pool",
        "Engine.__init__",
        "wanted != got",
        "False",
        ("tests/engine/test_engine.py", "-k", "not_the_runners"),
    ),
    Fault(
        "a cache takes a block twice",
        "RadixCache._check_new",
        "not self._held.isdisjoint(block_ids) or len(set(block_ids)) != len(block_ids)",
        "not self._held.isdisjoint(block_ids)",
        ("tests/cache/test_contract.py", "-k", "taken_once"),
    ),
    Fault(
        "a subscriber that fails is told nothing anew",
        "RadixCache.commit",
        "self._events.catch_up()",
        "",
        ("tests/cache/test_events.py", "-k", "disturbs"),
    ),
    Fault(
        "prefixes are kept without bound",
        "Scheduler._keep",
        "self._num_kept_tokens > self._num_slots",
        "False",
        ("tests/scheduling/test_waiting.py", "-k", "kept"),
    ),
    Fault(
        "copies run in the first layer alone",
        "Runner.copy",
        "self.config.num_layers",
        "1",
        ("tests/engine/model/test_runner.py",),
    ),
    Fault(
        "slots are off by one",
        "Runner._input",
        "positions % self.block_size",
        "(positions + 1) % self.block_size",
        ("tests/engine/model/test_runner.py",),
    ),
    # ---- tenants
    Fault(
        "a cap gives up blocks of a step under way",
        "TreeTenants._give_up",
        "node.num_uncommitted or (node.entry < 0 and not with_deferred)",
        "node.entry < 0 and not with_deferred",
        ("tests/cache/test_caps.py",),
    ),
    Fault(
        "a watch outlives what was removed",
        "RadixTree.remove_below",
        "for observer in self.observers: observer.removed(node)",
        "",
        ("tests/cache/test_watch.py",),
    ),
    Fault(
        "an owner outlives the salt that is cut off",
        "TreeTenants.trimmed",
        "node.owner = None",
        "",
        ("tests/cache/test_caps.py",),
    ),
    Fault(
        "an owner outlives a span that grows",
        "TreeTenants.grew",
        "node.owner = None",
        "",
        ("tests/cache/test_caps.py",),
    ),
    Fault(
        "the owner of a lower half is that of the whole",
        "TreeTenants.split",
        "lower.owner = None",
        "",
        ("tests/cache/test_caps.py",),
    ),
    Fault(
        "a parent that becomes a leaf is no tenant's",
        "TreeTenants.removed",
        "self._add_leaf(tenant, parent)",
        "",
        ("tests/cache/test_caps.py",),
    ),
    Fault(
        "blocks that a tenant pins are counted",
        "TreeTenants.pinned",
        "self._change(tenant, -self._num_own(node))",
        "",
        ("tests/cache/test_caps.py",),
    ),
    Fault(
        "what is deferred counts for a tenant as any other leaf",
        "TreeTenants._give_up",
        "node.entry < 0 and not with_deferred",
        "False",
        ("tests/cache/test_caps.py",),
    ),
    # ---- policies
    Fault(
        "partial blocks look as old as whole ones",
        "RadixTree.queue",
        "1 - len(leaf.span) / self.width",
        "0",
        ("tests/cache/test_policies.py",),
    ),
    Fault(
        "a policy that ranks is not asked",
        "RadixTree.queue",
        "self.policy.rank(leaf) if self._is_ranked else leaf.last_use",
        "leaf.last_use",
        ("tests/cache/test_policies.py", "-k", "paper"),
    ),
    Fault(
        "the hand of sieve turns back",
        "Sieve.rank",
        "max(node.policy_state, self._next_pass(node.born + node.older))",
        "node.policy_state",
        ("tests/cache/test_policies.py", "tests/cache/test_radix.py"),
    ),
    Fault("s3fifo has no ghosts", "S3Fifo.evicted", "self._ghosts[key] = None", "", ("tests/cache/test_policies.py",)),
    # ---- readers of traces
    Fault(
        "a system prompt beside the messages is not read",
        "with_system",
        "texts: list[Parts] = [content_parts(body, SYSTEM)] if SYSTEM in body else []",
        "body.get(SYSTEM)\ntexts: list[Parts] = []",
        READERS,
    ),
    Fault(
        "tools are not read", "_section", r'f"# {title}\n\n<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>"', '""', READERS
    ),
    Fault(
        "thoughts are not read",
        "_message_parts",
        "(*images_of(message), *_thoughts(message), *said)",
        "(*images_of(message), *said)",
        READERS,
    ),
    Fault("what a model thinks twice is read twice", "_thoughts", "dict.fromkeys", "list", READERS),
    Fault(
        "the answer to a call does not say to which",
        "parse_message",
        '_attributes(message, "name", "tool_call_id")',
        '_attributes(message, "name")',
        READERS,
    ),
    Fault(
        "one model hits what another computed",
        "namespace_of",
        '("model", *ADAPTERS)',
        '("model"[:0], *ADAPTERS)',
        READERS,
    ),
    Fault(
        "unknown keys are not named",
        "Fields.unread",
        'value not in (None, "", [], {})',
        'not value and value not in (None, "", [], {})',
        READERS,
    ),
    Fault("unknown keys inside messages are not named", "Fields.unread", "yield from inside.unread()", "", READERS),
    Fault(
        "keys are counted anew when a record is read again",
        "_FileRun._load",
        "self._parse(source.read(number, offset, size_bytes))",
        "self._parse(source.read(number, offset, size_bytes), self._counts)",
        READERS,
    ),
    Fault(
        "the other choices of a response are dropped in silence",
        "_answer",
        'found.drop("choices[1:]", choices[1:])',
        "",
        READERS,
    ),
    Fault(
        "a key that stands twice in an object is dropped in silence",
        "_object",
        "len(found) < len(pairs)",
        "False",
        READERS,
    ),
    Fault(
        "a request without a timestamp goes to the end",
        "in_order",
        "0.0 if here is None else here",
        '0.0 if here is None else float("inf")',
        ORDER,
    ),
    Fault(
        "a missing timestamp is not told",
        "in_order",
        "if here is not None:\n    on_odd(entry.number, num_requests, False)",
        "",
        ORDER,
    ),
    Fault(
        "timestamps that come late are not told",
        "_by_turn",
        "on_odd(current.number, current.item.num_requests, True)",
        "",
        ORDER,
    ),
    Fault(
        "a picture is known by the text of its base64",
        "media_of",
        '_base64(data) if described.lower().endswith(b";base64") else data',
        "data",
        MEDIA,
    ),
    Fault("a picture that spells an address is that address", "media_of", 'b"name:" + text', "text", MEDIA),
    Fault("an empty prompt is not counted", "Trace.__iter__", "counts.num_empty += not request.prompt", "", EMPTY),
    Fault(
        "an empty prompt is submitted to the simulator",
        "run",
        "request.prompt and simulator.fits(request, max_tokens)",
        "simulator.fits(request, max_tokens)",
        EMPTY,
    ),
    Fault(
        "why looks at tokens alone",
        "_marked",
        "request.namespace is None",
        "True",
        ("tests/experiments/test_compare.py", "-k", "model"),
    ),
    # ---- the kernels' calls, and their callers
    Fault(
        "masks: a gap is computed over",
        "_intervals",
        "not bool(((count == 0) | (count == last - lo)).all())",
        "False",
        MASKS,
    ),
    Fault(
        "masks: a bias is taken for a hidden key",
        "_as_bool",
        "not bool((seen | (mask <= _HIDDEN)).all())",
        "False",
        MASKS,
    ),
    Fault("masks: heads that differ", "_intervals", "mask.shape[1] > 1", "False", MASKS),
    Fault(
        "masks: a bidirectional block goes on as causal rows",
        "_segments",
        "step_hi[:, 1:] == step_hi[:, :-1]",
        "step_hi[:, 1:] <= 1",
        MASKS,
    ),
    Fault(
        "masks: a window that shrinks goes on",
        "_segments",
        "(step_hi[:, 1:] == step_hi[:, :-1]) & (step_lo[:, 1:] >= step_lo[:, :-1])",
        "step_hi[:, 1:] == step_hi[:, :-1]",
        MASKS,
    ),
    Fault(
        "masks: rows that see nothing are joined",
        "_segments",
        "seen[:, 1:] & seen[:, :-1]",
        "torch.ones_like(seen[:, 1:])",
        MASKS,
    ),
    Fault("masks: a window is the first row's", "_segments", "end - lo[last]", "hi[first] - lo[first]", MASKS),
    Fault(
        "masks: without one, a chunk is placed by a guess",
        "_without_mask",
        "causal and q_len != kv_len",
        "False",
        MASKS,
    ),
    Fault(
        "autocast: the tensors come as they are",
        "attention_forward",
        "query, key, value = (x.to(dtype) for x in (query, key, value))",
        "",
        ("tests/kernels/test_transformers.py", "-k", "autocast"),
    ),
    Fault(
        "sinks are left out beside transformers",
        "attention_forward",
        "s_aux",
        "None",
        ("tests/kernels/test_transformers.py", "-k", "gpt_oss"),
    ),
    Fault(
        "a row before the first key sees it",
        "Job.visible",
        "np.clip(position + 1, 0, hi)",
        "np.clip(position + 1, 1, hi)",
        UNSEEN,
    ),
    Fault(
        "Triton: a row before the first key sees it",
        "visible_range",
        "tl.minimum(position + 1, seq_len)",
        "tl.minimum(tl.maximum(position + 1, 1), seq_len)",
        UNSEEN,
    ),
    Fault(
        "a sink is seen where no key is",
        "State.finish",
        "self.total.mul_(keep).add_(torch.exp(sinks - top).masked_fill(~seen, 0.0))",
        "self.total.mul_(keep).add_(torch.exp(sinks - top))\nseen = seen | True",
        UNSEEN,
    ),
    Fault(
        "+inf is no empty part",
        "merge_states",
        "lses = lses.masked_fill(lses == torch.inf, -torch.inf)",
        "",
        UNSEEN,
    ),
    Fault("a merge of NaN is empty", "State.finish", "self.total != 0", "self.total > 0", UNSEEN),
    Fault(
        "a first state of NaN gives what its out holds",
        "merge_states",
        "outs[0].float().masked_fill(empty[0][..., None], 0.0).masked_fill(lses[0].isnan()[..., None], torch.nan)",
        "outs[0].float().masked_fill(empty[0][..., None], 0.0)",
        UNSEEN,
    ),
    Fault(
        "a trace of lengths tells what is shared",
        "Trace.__init__",
        "all(format.sharing_known for format in formats)",
        "True",
        ("tests/traces/test_block_ids.py",),
    ),
    Fault(
        "a general format takes another's records",
        "formats:",
        "lambda format: format.rank",
        "lambda format: -format.rank",
        ("tests/traces/test_block_ids.py",),
    ),
    # ---- experiments
    Fault(
        "a report demands today's policies of yesterday's rows",
        "history_of",
        '[name for name in rows[0] if name != "queue_aware" and all(name in each for each in closes)]',
        "list(HISTORY)",
        ("tests/experiments/test_policies.py", "-k", "rows_of_other_policies"),
    ),
    Fault(
        "an entry of no part of the report is taken",
        "_entries",
        "found.part not in PARTS",
        "False",
        ("tests/experiments/test_lab.py", "-k", "entry_of_no_part"),
    ),
    Fault(
        "workers outlive their parent",
        "_be_a_worker",
        "threading.Thread(target=_end_with_parent, daemon=True).start()",
        "",
        INTERRUPTIONS,
    ),
    Fault(
        "SIGTERM is no interruption", "run:", '("SIGINT", "SIGTERM", "SIGHUP")', '("SIGINT", "SIGHUP")', INTERRUPTIONS
    ),
    Fault(
        "workers are left where a run is stopped",
        "_beside_each_other",
        "process.kill()",
        "pass",
        INTERRUPTIONS,
    ),
    Fault(
        "a second signal disturbs the end",
        "interruptible.stop",
        "not came",
        "True",
        (*INTERRUPTIONS, "-k", "signals_are"),
    ),
    Fault(
        "what is ignored under nohup is not",
        "interruptible",
        "[number for number, handler in before.items() if handler is not signal.SIG_IGN]",
        "list(before)",
        (*INTERRUPTIONS, "-k", "signals_are"),
    ),
    Fault(
        "a damaged result counts as one",
        "run_all",
        """
            if isinstance(found, str):
                console.print(f"{found}; it is run anew", style="red", markup=False, highlight=False)
            elif found is not None:
                continue
        """,
        """
            if isinstance(found, str):
                console.print(f"{found}; it is run anew", style="red", markup=False, highlight=False)
            if found is not None:
                continue
        """,
        (*INTERRUPTIONS, "-k", "runs_anew"),
    ),
    Fault(
        "a result is not asked for its rows",
        "find_result",
        "with recorded_tables():\n    experiment.show(data)\nexperiment.answer(data)",
        "",
        (*INTERRUPTIONS, "-k", "damaged"),
    ),
    Fault(
        "damaged rows of an interrupted run are taken",
        "_Unfinished.__init__",
        '{cell: rows for cell, rows in found["cells"].items() if isinstance(rows, list)}',
        '{cell: rows for cell, rows in found["cells"].items()}',
        (*INTERRUPTIONS, "-k", "damaged_part"),
    ),
    # ---- plans that are kept
    Fault(
        "kept plans: tiles keep to the last key that rows see at the least lengths",
        "_rows",
        "extents.high[seq]",
        "extents.low[seq]",
        STEPPING,
    ),
    Fault(
        "kept plans: tiles keep to the first key that rows see at the greatest lengths",
        "_rows",
        "extents.low[seq]",
        "extents.high[seq]",
        STEPPING,
    ),
    Fault("kept plans: whatever the lengths", "TreePlan.serves", "self.extents.holds(seq_lens)", "True", STEPPING),
    Fault(
        "kept plans: whatever the rows",
        "TreePlan.serves",
        "np.array_equal(cu_seqlens_q, self.cu_seqlens_q)",
        "True",
        STEPPING,
    ),
    Fault(
        "kept plans: not for a window that hides nothing shared",
        "Extents.of",
        "hides = whole > 0",
        "hides = lo > 0",
        ("tests/kernels/test_extents.py",),
    ),
    Fault(
        "kernels: auto takes what is not installed",
        "_pick",
        "entry.is_installed",
        "True",
        ("tests/kernels/test_contract.py", "-k", "auto"),
    ),
    Fault(
        "plans: a cell shared once is shared for ever",
        "CellNumbers.release",
        "self.num_shared -= 1",
        "pass",
        ("tests/kernels/test_planner.py", "-k", "any_operations"),
    ),
    Fault(
        "plans: an interrupted step is remembered",
        "TreePlans.of",
        "self._known = None",
        "self._known = known",
        INTERRUPTED,
    ),
    Fault("plans: an interrupted planner goes on", "TreePlanner._check_whole", "self._changing", "False", INTERRUPTED),
    Fault(
        "plans: interrupted buffers pass for loaded",
        "PlanBuffers.load",
        "self._loaded = None",
        "",
        ("tests/kernels/test_tree_plan.py", "-k", "interrupted"),
    ),
    Fault(
        "plans: a table changed in place is the same table",
        "_Known._update",
        "table.copy() if table.flags.writeable else table",
        "table",
        ("tests/engine/test_tree_plans.py", "-k", "changed_in_a_table"),
    ),
    Fault(
        "plans: a pickled plan takes its planner along",
        "TreePlan.__getstate__",
        "partial(_as_it_is, self._table())",
        "self._table",
        ("tests/kernels/test_planner.py", "-k", "pickle"),
    ),
    *(
        Fault(
            f"a layout serves calls with other {what}",
            "Job.of",
            "(cu, seq_len, block_start, block_ids, *(() if plan is None else plan.arrays))",
            arrays,
            ("tests/kernels/test_layouts.py",),
        )
        for what, arrays in (
            ("blocks", "(cu, seq_len, block_start, *(() if plan is None else plan.arrays))"),
            ("lengths", "(cu, block_start, block_ids, *(() if plan is None else plan.arrays))"),
            ("rows", "(seq_len, block_start, block_ids, *(() if plan is None else plan.arrays))"),
            ("plans", "(cu, seq_len, block_start, block_ids)"),
        )
    ),
    Fault(
        "rows of a product are not cut as measured",
        "linear",
        """
            if len(pieces) == 1:
                return ways[rule.way(padded)](x, weight, bias)[:num_rows].contiguous()
        """,
        "if True:\n    return ways[0](x, weight, bias)[:num_rows].contiguous()",
        ("tests/engine/model/test_row_linear.py",),
    ),
    Fault(
        "a size is computed the wrong way about",
        "linear",
        "rule.way(part.shape[0])",
        "0",
        ("tests/engine/model/test_row_linear.py",),
    ),
    Fault(
        "rows without a rule are computed all the same",
        "Decoder.check_rows",
        "linear_rule(product).require()",
        "linear_rule(product)",
        ("tests/engine/model/test_invariance.py", "-k", "nothing_agrees"),
    ),
    Fault(
        "attention without a rule is computed all the same",
        "Decoder.check_rows",
        "attention_row_rule(self.weights.embedding.dtype, self.config.head_dim).require()",
        "",
        ("tests/engine/model/test_invariance.py", "-k", "without_a_rule"),
    ),
    Fault(
        "a change of threads is not noticed",
        "Decoder.check_rows",
        "settings() == self._checked",
        "self._checked is not None",
        ("tests/engine/model/test_invariance.py", "-k", "nothing_agrees"),
    ),
    Fault(
        "weights are packed whether rows keep their bits or not",
        "_packed_by_rule",
        "row_linear.packs(weight.dtype) and row_linear.linear_rule(product).holds",
        "row_linear.packs(weight.dtype)",
        ("tests/engine/model/test_invariance.py", "-k", "packed_rows_differ"),
    ),
    Fault(
        "weights begin anywhere",
        "InvariantArithmetic.prepared",
        "row_linear.aligned",
        "lambda weight: weight",
        ("tests/engine/model/test_invariance.py", "-k", "aligned"),
    ),
    Fault(
        "a mask is boolean for models that add it",
        "whole_mask",
        "eager_mask(*args, **kwargs)",
        "eager_mask(*args, **kwargs) == 0",
        ("tests/kernels/test_transformers.py", "-k", "never_call"),
    ),
    Fault("the name of a picture is decoded", "media_of", "len(text) >= _LEAST_DATA", "True", MEDIA),
    Fault(
        "bits that encode nothing are dropped",
        "_base64",
        'base64.b64encode(found).rstrip(b"=") == packed',
        "True",
        MEDIA,
    ),
    Fault("an adapter's keys count in their order", "_adapter", "dict(sorted(value.items()))", "value", READERS),
    Fault(
        "a refused order takes the cache",
        "SchedulerConfig.__post_init__",
        "not isinstance(self.order, str) or self.order not in ORDERS",
        "False",
        ("tests/engine/test_engine.py", "-k", "limits_that_are_refused"),
    ),
    Fault(
        "signals that could not all be held stay held",
        "HeldSignals.__enter__",
        "self._give_back()",
        "",
        ("tests/engine/test_held_signals.py",),
    ),
    # ---- hybrid models
    Fault(
        "a checkpoint that a lease goes on from may go",
        "HybridCache.acquire",
        "found.pins += 1",
        "",
        ("tests/cache/test_hybrid.py", "-k", "goes_on_from_stays"),
    ),
    Fault(
        "KV that no checkpoint needs stays",
        "HybridCache._end",
        "return self._give_up(node)",
        "return NO_BLOCKS",
        HYBRID,
    ),
    Fault(
        "a checkpoint stays with the lower half of a split",
        "TreeCheckpoints.split",
        "self._move(lower, upper, lower.start)",
        "",
        HYBRID,
    ),
    Fault(
        "a state is shared without a holder",
        "HybridManager._share",
        "pool.share(state.recurrent)",
        "state.recurrent",
        HYBRID,
    ),
    Fault(
        "a checkpoint of a failed step stays",
        "HybridCache.withdraw",
        "is_new and checkpoint in self._checkpoints",
        "False",
        ("tests/cache/test_hybrid.py", "-k", "fails"),
    ),
    Fault(
        "a block that another writes to is not copied",
        "HybridManager._is_cut",
        "state.position % self.layout.block_size > 0",
        "False",
        ("tests/blocks/test_hybrid_replay.py", "-k", "written_to"),
    ),
]
