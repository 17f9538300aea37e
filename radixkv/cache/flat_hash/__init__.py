"""FlatHashCache: whole blocks found by the hash of all tokens up to their end, by vLLM's rules."""
