"""Which sequence holds which block: the pool of block ids, and the manager in which pool and cache meet."""
