"""RadixCache: a radix tree of token spans that shares to the token and evicts leaves first."""
