"""What is cached: token ids and the blocks that hold their KV. A radix tree, a flat hash, and no cache, on one contract."""
