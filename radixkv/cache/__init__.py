"""What is cached, and in which blocks: a radix tree, a flat hash and no cache, on one contract. No tensors."""
