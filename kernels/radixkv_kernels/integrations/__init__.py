"""The calls in other packages' shapes: `transformers` (register), `flash_attn`, `flashinfer`. Imports nothing."""
