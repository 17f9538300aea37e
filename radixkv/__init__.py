"""radixkv: prefix caching on a radix tree of token spans. Importing this loads nothing else."""

__version__ = "0.1.0"
