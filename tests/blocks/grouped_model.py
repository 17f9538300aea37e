"""vLLM's rules for groups of layers as plainly as they go: one list of free blocks, prefixes as keys. Test-only."""

from math import inf


class NoBlocks(Exception):
    pass


class GroupedModel:
    """Groups are "full", "state" or a window's number of tokens."""

    def __init__(self, groups, block_size, unit, num_blocks):
        self.groups, self.size, self.unit = groups, block_size, unit
        self.free = list(range(num_blocks))
        self.users = dict.fromkeys(self.free, 0)
        self.registered = []  # (group, prefix, is_partial, block), the oldest first
        self.num_evicted = 0

    def find(self, group, prefix, is_partial=False):
        found = (block for *key, block in self.registered if key == [group, prefix, is_partial])
        return next(found, None)

    def is_cached(self, block):
        return any(block == other for *_, other in self.registered)

    def use(self, blocks):
        for block in blocks:
            if block is not None:
                self.users[block] += 1
                if block in self.free:
                    self.free.remove(block)

    def give_back(self, blocks):
        unused = []
        for block in reversed([block for block in blocks if block is not None]):
            self.users[block] -= 1
            if not self.users[block]:
                unused.append(block)
        self.free[:0] = [block for block in unused if not self.is_cached(block)]
        self.free += [block for block in unused if self.is_cached(block)]

    def pop(self, count):
        taken = [self.free.pop(0) for _ in range(count)]
        self.num_evicted += sum(map(self.is_cached, taken))
        self.registered = [entry for entry in self.registered if entry[-1] not in taken]
        for block in taken:
            self.users[block] = 1
        return taken

    def full_blocks(self, tokens, end):
        """How far full attention can go on, up to `end`, and the source of what is inside a block there."""
        full = [g for g, kind in enumerate(self.groups) if kind == "full"]
        if not full:
            return end
        run = 0
        while run + self.size <= end and all(self.find(g, tokens[: run + self.size]) is not None for g in full):
            run += self.size
        inside = [
            p
            for p in range(run + self.unit, min(run + self.size - self.unit, end) + 1, self.unit)
            if all(self.find(g, tokens[:p], True) is not None for g in full)
        ]
        return max([run, *inside])

    def can_go_on(self, group, tokens, p):
        kind = self.groups[group]
        if kind == "full" or not p:
            return True
        if kind == "state":
            return self.find(group, tokens[:p]) is not None
        first = max(p // self.size - -(-(kind - 1) // self.size), 0)
        ends = range((first + 1) * self.size, p + 1, self.size)
        return p % self.size == 0 and all(self.find(group, tokens[:end]) is not None for end in ends)

    def serve(self, tokens, budget):
        """Returns hit and passes; None for a request that does not fit."""
        n, size, unit = len(tokens), self.size, self.unit
        last = (n - 1) // unit * unit
        full = self.full_blocks(tokens, last)
        hit = max(
            p for p in range(0, full + 1, unit) if all(self.can_go_on(g, tokens, p) for g in range(len(self.groups)))
        )
        deepest = full
        if "full" not in self.groups:
            first_kind = [g for g, kind in enumerate(self.groups) if kind == self.groups[0]]
            deepest = max(p for p in range(0, full + 1, unit) if all(self.can_go_on(g, tokens, p) for g in first_kind))
        junction = deepest if deepest > hit else 0
        tables = []
        before_it = list(self.free)
        for g, kind in enumerate(self.groups):
            table = [self.find(g, tokens[:end]) for end in range(size, hit + 1, size)]
            if kind == "state":
                table = [None] * -(-hit // size)
                if hit:
                    table[-1] = self.find(g, tokens[:hit])
            elif kind == "full" and hit % size:
                # the whole block, or what is cached of it
                whole = tokens[: -(-hit // size) * size]
                source = self.find(g, whole) if len(whole) == -(-hit // size) * size <= full else None
                table.append(self.find(g, tokens[:full], True) if source is None else source)
            elif kind != "full":
                first = max(hit // size - -(-(kind - 1) // size), 0)
                table = [None] * first + table[first:]
            self.use(table)
            tables.append(table)
        at, passes, before, has_tail = hit, 0, {}, set()
        try:
            while at < n:
                if passes:
                    self.drop(tables, at, before)
                end = self.chunk_end(n, at, junction, budget)
                copies = [
                    bool(at % size) and (not passes or (kind == "state" and self.is_cached(table[-1])))
                    for kind, table in zip(self.groups, tables, strict=True)
                ]
                wanted = [max(-(-end // size) - len(table), 0) for table in tables]
                wanted = [min(w, 1) if k == "state" else w for w, k in zip(wanted, self.groups, strict=True)]
                if sum(wanted) + sum(copies) > len(self.free):
                    raise NoBlocks
                sources = []
                for g, table in enumerate(tables):
                    new = self.pop(wanted[g] + copies[g])
                    if self.groups[g] == "state" and table and new:
                        before[g] = len(table) - 1
                    if copies[g]:
                        copy, source = new.pop(0), table[-1]
                        if passes:
                            self.registered = [
                                (*key, copy if block == source else block) for *key, block in self.registered
                            ]
                            moved = [entry for entry in self.registered if entry[-1] == copy]
                            self.registered = [entry for entry in self.registered if entry[-1] != copy] + moved
                            sources.append(copy)
                        else:
                            table[-1] = copy
                            sources.append(source)
                    if self.groups[g] == "state":
                        table += [None] * (-(-end // size) - len(new) - len(table))
                    table += new
                for g, table in enumerate(tables):
                    self.register(g, tokens, junction, table, at, end, has_tail)
                for source in sources:
                    self.give_back([source])
                at, passes = end, passes + 1
        except NoBlocks:
            return None
        finally:
            for table in tables:
                self.give_back(table)
            if not passes:
                self.free = before_it
        return hit, passes

    def register(self, g, tokens, junction, table, start, end, has_tail):
        n, size, unit = len(tokens), self.size, self.unit
        last = (n - 1) // unit * unit
        kind = self.groups[g]
        new = [p for p in range(size, end + 1, size) if p > start]
        if kind == "state":
            if end in {last, last // size * size, junction // size * size}:
                self.registered.append((g, tokens[:end], False, table[-(-end // size) - 1]))
            return
        if kind != "full":
            reach = -(-(kind - 1) // size) * size
            new = [p for p in new if any(to // size * size - reach < p <= to // size * size for to in (last, junction))]
        self.registered += [(g, tokens[:p], False, table[p // size - 1]) for p in new]
        if kind == "full" and last % size and last <= end and g not in has_tail:
            has_tail.add(g)
            self.registered.append((g, tokens[:last], True, table[last // size]))

    def drop(self, tables, at, before):
        for g, (kind, table) in enumerate(zip(self.groups, tables, strict=True)):
            if kind == "full":
                continue
            reach = 1 if kind == "state" else kind - 1
            gone = []
            for i in reversed(range(len(table))):
                if (i + 1) * self.size <= at - reach:
                    if table[i] is None:
                        break
                    gone.insert(0, table[i])
                    table[i] = None
            self.give_back(gone)
            previous = before.get(g, inf)
            if previous < -(-at // self.size) - 1 and table[previous] is not None:
                self.give_back([table[previous]])
                table[previous] = None

    def chunk_end(self, n, start, junction, budget):
        size, unit = self.size, self.unit
        end = min(n, start + budget)
        if "state" not in self.groups:
            return end
        if end < n and end // size * size > start:
            end = end // size * size
        stops = {p for p in range(start + 1, end) if p % size == 0} if start % size else set()
        stops |= {(n - 1) // size * size, (n - 1) // unit * unit}
        if start < junction < end:
            stops.add(start + (junction - start) // size * size)
        return min([stop for stop in stops if start < stop < end], default=end)
