"""The prefix cache of models whose layers keep more than KV of every token: a radix tree with checkpoints in it."""
