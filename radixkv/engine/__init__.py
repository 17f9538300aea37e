"""The engine: a model, its KV tensors, and steps that the scheduler plans."""
