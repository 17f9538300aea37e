"""radixkv: prefix caching on a radix tree of token spans. Importing this loads nothing else; import the part you need."""

__version__ = "0.1.0"
