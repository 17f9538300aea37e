"""Faults to plant, each with the tests that are to notice. A `find` stands exactly once in all packages."""

from typing import NamedTuple

SCRIPTS = ("tests/test_shadow_engine.py::test_random_scripts",)
MANAGER = ("tests/test_kv_manager.py", "-k", "not every_row_read")
ISOLATION = ("tests/test_isolation.py",)
READERS = ("tests/workloads/test_keys.py",)
ORDER = ("tests/workloads/test_order.py",)
MEDIA = ("tests/workloads/test_media.py",)
EMPTY = ("tests/workloads/test_empty_prompts.py",)
MASKS = ("tests/kernels/test_transformers_masks.py",)
UNSEEN = ("tests/kernels/test_unseen.py",)
INTERRUPTIONS = ("tests/experiments/test_interruptions.py",)
STEPPING = ("tests/kernels/test_stepping.py",)
INTERRUPTED = ("tests/kernels/test_planner.py", "tests/test_tree_plans.py", "-k", "interrupted")


class Fault(NamedTuple):
    name: str
    find: str
    replace: str
    tests: tuple[str, ...] = SCRIPTS


FAULTS = [
    # ---- matching
    Fault("a match is not pinned", "        tree.pin(node)\n        lease = Lease(", "        lease = Lease("),
    Fault(
        "the source of a copy is not pinned",
        "                tree.pin(source)\n",
        "",
    ),
    Fault(
        "a pinned leaf stays in the order of eviction",
        "            self.leave_leaves(node)\n        while True:\n            node.pins += 1\n",
        "            pass\n        while True:\n            node.pins += 1\n",
    ),
    Fault("a release does not unpin", "        self.tree.unpin(node, stamp=stamp)\n", "        pass\n"),
    Fault(
        "off by one: the last token is matched too",
        "self.cache.acquire(packed[:-TOKEN_BYTES], ",
        "self.cache.acquire(packed, ",
        ("tests/test_kv_manager.py::test_at_least_one_token_is_computed",),
    ),
    Fault(
        "what this very step computes is copied from",
        "        return self.fresh < self.num_blocks\n",
        "        return True\n",
    ),
    Fault(
        "an advance keeps the partial match behind it",
        "  # it continued the old end\n            self._drop_partial(sequence, first)",
        "\n            pass",
        MANAGER,
    ),
    # ---- tails
    Fault(
        "a stale tail: the wrong block",
        "Tail(rest, int(sequence.block_table[leased]))",
        "Tail(rest, int(sequence.block_table[-1]))",
    ),
    Fault(
        "a tail with a token that was never computed",
        "num_left = max(sequence.num_computed - first, 0)",
        "num_left = max(sequence.num_tokens - first, 0)",
    ),
    Fault(
        "a fuller block does not replace a tail",
        "        if node.children:\n            self._supersede(node.tail_before(span))\n",
        "",
    ),
    # ---- namespaces
    Fault(
        "a namespace is dropped at admission",
        "self.cache.acquire(packed[:-TOKEN_BYTES], namespace)",
        "self.cache.acquire(packed[:-TOKEN_BYTES], None)",
    ),
    Fault(
        "a namespace is dropped when publishing",
        "            key = self._interner.mark(key, lease.namespace, lease.num_tokens, add=add)\n",
        "            pass\n",
    ),
    Fault(
        "the type of a namespace is forgotten",
        "pair = (replace(part, start=0), token)",
        "pair = (repr(part)[-4:], token)",
    ),
    Fault(
        "all of a namespace but its first part is ignored",
        "        for part in parts(namespace):\n            at = ",
        "        for part in parts(namespace)[:1]:\n            at = ",
    ),
    # ---- steps
    Fault(
        "what a failed step published stays",
        "        blocks = _joined(self.tree.withdraw())\n",
        "        self.commit()\n        return NO_BLOCKS\n",
    ),
    Fault("a failed step does not cut leases back", "            self._cut_back(lease)\n", "            pass\n"),
    Fault("a failed step loses a sequence's own blocks", "log.kept(leased)]", "NO_BLOCKS]"),
    Fault("a failed step frees nothing that it took", "            self.allocator.free(log.to_free(leased))\n", ""),
    Fault(
        "a duplicate's own block is never freed",
        "for log in self._step.values():\n            for own in log.replaced:",
        "for log in ():\n            for own in log.replaced:",
    ),
    Fault(
        "a fork copies a row too few",
        "len(packed) // TOKEN_BYTES - i * self.cache.block_size)",
        "len(packed) // TOKEN_BYTES - i * self.cache.block_size - 1)",
    ),
    Fault(
        "sequences that fail alone are not withdrawn",
        "                self.scheduler.withdraw()\n                self.end_all(",
        "                self.end_all(",
    ),
    # ---- scheduling
    Fault(
        "a sequence of this step is preempted", "[other for other in later if other.step != self.step]", "list(later)"
    ),
    Fault(
        "a preempted sequence believes its KV is there",
        "        sequence.num_computed = sequence.target = 0\n",
        "        sequence.target = 0\n",
    ),
    Fault(
        "the KV of a decoded token is not written", "if end % stride == 0 else end - 1", "if end % stride == 0 else end"
    ),
    Fault(
        "a block is written that is somebody else's",
        "return max(start, first + self.manager.publish(",
        "return max(start, 0 * self.manager.publish(",
    ),
    Fault(
        "a step counts as computed before it has run",
        "        sequence.step, sequence.target = self.step, end\n",
        "        sequence.step, sequence.target = self.step, end\n        sequence.num_computed = end\n",
    ),
    # ---- resets
    Fault(
        "who ran before a reset publishes after it (radix)",
        "kinds(lease.namespace))\n        given_up: list[int] = []",
        "kinds(lease.namespace)) and False\n        given_up: list[int] = []",
    ),
    Fault(
        "who ran before a reset publishes after it (flat)",
        "kinds(lease.namespace))\n        forgotten = ",
        "kinds(lease.namespace)) and False\n        forgotten = ",
    ),
    Fault("a fork of who ran before a reset publishes", "        lease.is_stale = is_stale\n", "", ISOLATION),
    Fault(
        "what was forgotten becomes evictable, and found",
        "        if node.is_forgotten:\n            self.superseded",
        "        if False:\n            self.superseded",
    ),
    Fault(
        "a tenant's blocks survive his reset (flat)",
        "        self._parts_of.keep(ids, cursor.parts, len(cursor.blocks))\n",
        "",
    ),
    # ---- the flat hash
    Fault(
        "a hash without what came before",
        "parent = self._map.hash_of[cursor.blocks[-1]] if cursor.blocks else self._hasher.seed",
        "parent = self._hasher.seed",
    ),
    Fault(
        "colliding hashes are believed",
        "block = next((b for b in block_map.all(block_hash) if self[b].follows(parent, tokens, keys)), None)",
        "block = next((b for b in block_map.all(block_hash)), None)",
    ),
    # ---- the engine
    Fault(
        "an abort ends a later request of that id",
        "if self._generations.get(request_id) is self._aborting[0]:",
        "if self._generations.get(request_id) is not None:",
        ("tests/test_fault_injection.py::test_an_abort_that_comes_too_late",),
    ),
    Fault(
        "a number that is drawn again is another one",
        "        if i != self._next:\n",
        "        if self._next is None:\n",
        ("tests/test_fault_injection.py", "-k", "sampling_that_fails or while_sampling"),
    ),
    Fault(
        "what was interrupted goes on half done",
        "            if not self._is_whole:\n                self._begin_anew()\n            raise",
        "            self._is_whole = True\n            raise",
        ("tests/test_shadow_engine.py::test_random_scripts_interrupted_at_random_lines",),
    ),
    Fault(
        "beginning anew forgets the tokens that were sampled",
        "                for token_id in token_ids:\n                    self.append_token(sequence, token_id)\n",
        "",
        ("tests/test_shadow_engine.py::test_random_scripts_interrupted_at_random_lines",),
    ),
    Fault(
        "beginning anew keeps what was cached",
        "        self._begin()\n        self.cache.clear()\n",
        "        self._begin()\n",
        ("tests/test_shadow_engine.py::test_random_scripts_interrupted_at_random_lines",),
    ),
    Fault(
        "signals come between lines that belong together",
        "        if self._is_open:\n            self._handlers[number]",
        "        if True:\n            self._handlers[number]",
        ("tests/test_held_signals.py",),
    ),
    Fault(
        "generate that is left goes on",
        "        except BaseException:\n            self._abort(generations)\n            raise",
        "        except BaseException:\n            raise",
        ("tests/test_held_signals.py",),
    ),
    Fault(
        "an abort is taken out of its queue first",
        '                self.stepper.end_all(request_id, "abort")\n            self._aborting.popleft()\n',
        '                self._aborting.popleft()\n                self.stepper.end_all(request_id, "abort")\n',
        ("tests/test_fault_injection.py", "-k", "interrupted_abort"),
    ),
    Fault(
        "a fork counts as computed before its copies have run",
        "        self.running.add(other)\n        return other, copies\n",
        "        self.running.add(other)\n        self.copied(other, sequence)\n        return other, copies\n",
        ("tests/test_scheduler.py", "-k", "once_its_copies"),
    ),
    Fault(
        "a cache serves two managers",
        '        take_over(cache, "cache", self)\n',
        "",
        ("tests/test_engine.py", "-k", "one_owner"),
    ),
    Fault(
        "an engine takes any pool",
        '            if wanted != got:\n                raise ValueError(f"scheduler',
        '            if False:\n                raise ValueError(f"scheduler',
        ("tests/test_engine.py", "-k", "not_the_runners"),
    ),
    Fault(
        "a cache takes a block twice",
        "        if not self._held.isdisjoint(block_ids) or len(set(block_ids)) != len(block_ids):",
        "        if not self._held.isdisjoint(block_ids):",
        ("tests/cache/test_contract.py", "-k", "taken_once"),
    ),
    Fault(
        "a subscriber that fails is told nothing anew",
        "        fresh.clear()\n        self._moved.clear()\n        self._events.catch_up()\n",
        "        fresh.clear()\n        self._moved.clear()\n",
        ("tests/cache/test_events.py", "-k", "disturbs"),
    ),
    Fault(
        "prefixes are kept without bound",
        "while self._num_kept_tokens > self._num_slots:",
        "while False:",
        ("tests/test_waiting.py", "-k", "kept"),
    ),
    Fault(
        "copies run in the first layer alone",
        "layers = np.arange(self.config.num_layers, dtype=np.int64)",
        "layers = np.arange(1, dtype=np.int64)",
        ("tests/model/test_runner.py",),
    ),
    Fault(
        "slots are off by one",
        "blocks.astype(np.int64) * self.block_size + positions % self.block_size",
        "blocks.astype(np.int64) * self.block_size + (positions + 1) % self.block_size",
        ("tests/model/test_runner.py",),
    ),
    # ---- tenants
    Fault(
        "a cap gives up blocks of a step under way",
        "            if node.fresh:\n                fresh.append(heappop(heap))\n                continue\n",
        "",
        ("tests/cache/test_caps.py",),
    ),
    Fault(
        "a watch outlives what was forgotten",
        "                self.watches.cut(node, node.parent)\n        self._detach(top)",
        "                pass\n        self._detach(top)",
        ("tests/cache/test_watch.py",),
    ),
    # ---- readers of traces
    Fault(
        "a system prompt beside the messages is not read",
        "    texts: list[Parts] = [content_parts(body, SYSTEM)] if SYSTEM in body else []\n",
        "    body.get(SYSTEM)\n    texts: list[Parts] = []\n",
        READERS,
    ),
    Fault("tools are not read", 'return f"# {title}\\n\\n<{tag}>', 'return "" and f"# {title}\\n\\n<{tag}>', READERS),
    Fault("thoughts are not read", "*_thoughts(message), *said)", "*said)", READERS),
    Fault(
        "what a model thinks twice is read twice",
        "dict.fromkeys(_text(message, key)",
        "list(_text(message, key)",
        READERS,
    ),
    Fault(
        "the answer to a call does not say to which",
        '_attributes(message, "name", "tool_call_id")',
        '_attributes(message, "name")',
        READERS,
    ),
    Fault(
        "one model hits what another computed",
        'for key in ("model", *ADAPTERS):',
        'for key in ("model"[:0], *ADAPTERS):',
        READERS,
    ),
    Fault(
        "unknown keys are not named",
        "if value not in (None",
        "if not value and value not in (None",
        READERS,
    ),
    Fault("unknown keys inside messages are not named", "yield from inside.unread()", "pass", READERS),
    Fault(
        "keys are counted anew when a record is read again",
        "self._parse(source.read(number, offset, size_bytes))",
        "self._parse(source.read(number, offset, size_bytes), self._counts)",
        READERS,
    ),
    Fault(
        "the other choices of a response are dropped in silence",
        '        found.drop("choices[1:]", choices[1:])\n',
        "",
        READERS,
    ),
    Fault(
        "a key that stands twice in an object is dropped in silence",
        "    if len(found) < len(pairs):\n",
        "    if False:\n",
        READERS,
    ),
    Fault(
        "a request without a timestamp goes to the end",
        "[0.0 if here is None else here] * num_requests",
        "[0.0 if here is None else float('inf')] * num_requests",
        ORDER,
    ),
    Fault(
        "a missing timestamp is not told",
        "        elif here is not None:\n            on_odd(entry.number, num_requests, False)\n",
        "",
        ORDER,
    ),
    Fault(
        "timestamps that come late are not told",
        "on_odd(current.number, current.item.num_requests, True)",
        "pass",
        ORDER,
    ),
    Fault(
        "a picture is known by the text of its base64",
        'found = _base64(data) if described.lower().endswith(b";base64") else data',
        "found = data",
        MEDIA,
    ),
    Fault(
        "a picture that spells an address is that address",
        'found = b"name:" + text',
        "found = text",
        MEDIA,
    ),
    Fault("an empty prompt is not counted", "counts.num_empty += not request.prompt", "pass", EMPTY),
    Fault(
        "an empty prompt is submitted to the simulator",
        "if request.prompt and simulator.fits(",
        "if simulator.fits(",
        EMPTY,
    ),
    Fault(
        "why looks at tokens alone",
        "if request.namespace is None:\n        return request.prompt",
        "if True:\n        return request.prompt",
        ("tests/experiments/test_compare.py", "-k", "model"),
    ),
    # ---- the kernels' calls, and who calls them
    Fault(
        "masks: a gap is computed over",
        '        raise UnsupportedImplementation(\n            "attention_mask: expected no gap',
        '        print(\n            "attention_mask: expected no gap',
        MASKS,
    ),
    Fault(
        "masks: a bias is taken for a hidden key",
        "    if not bool((seen | (mask <= _HIDDEN)).all()):",
        "    if False:",
        MASKS,
    ),
    Fault("masks: heads that differ", "    if mask.shape[1] > 1 and not", "    if False and not", MASKS),
    Fault(
        "masks: a bidirectional block goes on as causal rows",
        "goes_on = (step_hi[:, 1:] == step_hi[:, :-1]) & ",
        "goes_on = (step_hi[:, 1:] <= 1) & ",
        MASKS,
    ),
    Fault(
        "masks: a window that shrinks goes on",
        " & (step_lo[:, 1:] >= step_lo[:, :-1])",
        "",
        MASKS,
    ),
    Fault(
        "masks: rows that see nothing are joined",
        "    regular = seen[:, 1:] & seen[:, :-1]\n",
        "    regular = torch.ones_like(seen[:, 1:])\n",
        MASKS,
    ),
    Fault(
        "masks: a window is the first row's",
        "window = (end - lo[last]).masked_fill(",
        "window = (hi[first] - lo[first]).masked_fill(",
        MASKS,
    ),
    Fault(
        "masks: without one, a chunk is placed by a guess",
        "    if causal and q_len != kv_len:\n",
        "    if False:\n",
        MASKS,
    ),
    Fault(
        "autocast: the tensors come as they are",
        "        query, key, value = (x.to(dtype) for x in (query, key, value))\n",
        "        pass\n",
        ("tests/kernels/test_transformers.py", "-k", "autocast"),
    ),
    Fault(
        "sinks are left out beside transformers",
        "            sinks=s_aux,\n",
        "",
        ("tests/kernels/test_transformers.py", "-k", "gpt_oss"),
    ),
    Fault(
        "a row before the first key sees it",
        "            hi = np.clip(position + 1, 0, hi)\n",
        "            hi = np.clip(position + 1, 1, hi)\n",
        UNSEEN,
    ),
    Fault(
        "Triton: a row before the first key sees it",
        "        end = tl.minimum(position + 1, seq_len)\n",
        "        end = tl.minimum(tl.maximum(position + 1, 1), seq_len)\n",
        UNSEEN,
    ),
    Fault(
        "a sink is seen where no key is",
        ".masked_fill(~seen, 0.0))\n            self.acc.mul_(keep[..., None])",
        ")\n            seen = seen | True\n            self.acc.mul_(keep[..., None])",
        UNSEEN,
    ),
    Fault(
        "+inf is no empty part",
        "    lses = lses.masked_fill(lses == torch.inf, -torch.inf)\n",
        "",
        UNSEEN,
    ),
    Fault(
        "a merge of NaN is empty",
        "        seen = self.total != 0  # NaN is seen too\n",
        "        seen = self.total > 0\n",
        UNSEEN,
    ),
    Fault(
        "a first state of NaN gives what its out holds",
        ".masked_fill(lses[0].isnan()[..., None], torch.nan)",
        "",
        UNSEEN,
    ),
    # ---- experiments
    Fault(
        "workers outlive their parent",
        "    threading.Thread(target=_end_with_parent, daemon=True).start()\n",
        "",
        INTERRUPTIONS,
    ),
    Fault(
        "SIGTERM is no interruption",
        'for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr',
        'for name in ("SIGINT", "SIGHUP") if hasattr',
        INTERRUPTIONS,
    ),
    Fault(
        "workers are left where a run is stopped",
        "                process.kill()\n                process.join()\n",
        "                pass\n",
        INTERRUPTIONS,
    ),
    Fault(
        "a second signal disturbs the end",
        "        if not came:\n",
        "        if True:\n",
        (*INTERRUPTIONS, "-k", "signals_are"),
    ),
    Fault(
        "what is ignored under nohup is not",
        "taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]",
        "taken = list(before)",
        (*INTERRUPTIONS, "-k", "signals_are"),
    ),
    Fault(
        "a damaged result counts as one",
        "            elif found is not None:\n                continue\n",
        "            if found is not None:\n                continue\n",
        (*INTERRUPTIONS, "-k", "runs_anew"),
    ),
    Fault(
        "a result is not asked for its rows",
        "        with recorded_tables():\n            experiment.show(data)\n        experiment.answer(data)\n",
        "",
        (*INTERRUPTIONS, "-k", "damaged"),
    ),
    Fault(
        "damaged rows of an interrupted run are taken",
        'for cell, rows in found["cells"].items() if isinstance(rows, list)}',
        'for cell, rows in found["cells"].items()}',
        (*INTERRUPTIONS, "-k", "damaged_part"),
    ),
    # ---- plans that are kept
    Fault(
        "kept plans: tiles keep to the last key that rows see at the least lengths",
        "    hi, lo = extents.high[seq], ",
        "    hi, lo = extents.low[seq], ",
        STEPPING,
    ),
    Fault(
        "kept plans: tiles keep to the first key that rows see at the greatest lengths",
        "np.maximum(extents.low[seq] - before_end",
        "np.maximum(extents.high[seq] - before_end",
        STEPPING,
    ),
    Fault("kept plans: whatever the lengths", " and self.extents.holds(seq_lens)", "", STEPPING),
    Fault(
        "kept plans: whatever the rows",
        "return np.array_equal(cu_seqlens_q, self.cu_seqlens_q) and ",
        "return ",
        STEPPING,
    ),
    Fault(
        "kept plans: not for a window that hides nothing shared",
        "        hides = whole > 0\n",
        "        hides = lo > 0\n",
        ("tests/kernels/test_extents.py",),
    ),
    Fault(
        "plans: an interrupted step is remembered",
        "        self._known = None\n        plans = known",
        "        self._known = known\n        plans = known",
        INTERRUPTED,
    ),
    Fault(
        "plans: an interrupted planner goes on",
        "        if self._changing:\n",
        "        if False:\n",
        INTERRUPTED,
    ),
    Fault(
        "plans: interrupted buffers pass for loaded",
        "        self._loaded = None\n        num_items, items",
        "        num_items, items",
        ("tests/kernels/test_plan.py", "-k", "interrupted"),
    ),
    Fault(
        "plans: a table changed in place is the same table",
        "table.copy() if table.flags.writeable else table",
        "table",
        ("tests/test_tree_plans.py", "-k", "changed_in_a_table"),
    ),
    Fault(
        "plans: a pickled plan takes its planner along",
        "partial(_as_it_is, self._table())",
        "self._table",
        ("tests/kernels/test_planner.py", "-k", "pickle"),
    ),
    # ---- rows that share their bits
    Fault(
        "rows of a product are not cut as measured",
        "    if len(pieces) == 1:\n        return _WAYS[rule.way(padded)]",
        "    if True:\n        return _WAYS[0]",
        ("tests/model/test_row_linear.py",),
    ),
    Fault(
        "a size is computed the wrong way about",
        "        out.copy_(_WAYS[rule.way(part.shape[0])](aligned(part), weight, bias))\n",
        "        out.copy_(_WAYS[0](aligned(part), weight, bias))\n",
        ("tests/model/test_row_linear.py",),
    ),
    Fault(
        "rows without a rule are computed all the same",
        "            linear_rule(*shape).require()\n",
        "            linear_rule(*shape)\n",
        ("tests/model/test_invariance.py", "-k", "nothing_agrees"),
    ),
    Fault(
        "attention without a rule is computed all the same",
        "        attention_row_rule(self.weights.embedding.dtype, self.config.head_dim).require()\n",
        "",
        ("tests/model/test_invariance.py", "-k", "without_a_rule"),
    ),
    Fault(
        "a change of threads is not noticed",
        'type != "cpu" or settings() == self._checked:',
        'type != "cpu" or self._checked is not None:',
        ("tests/model/test_invariance.py", "-k", "nothing_agrees"),
    ),
    Fault(
        "weights begin anywhere",
        "weights.mapped(row_linear.aligned)",
        "weights.mapped(lambda weight: weight)",
        ("tests/model/test_invariance.py", "-k", "aligned"),
    ),
]
