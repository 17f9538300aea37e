"""Paged-attention kernels for anyone's block tables: plain tensors in, plain tensors out. Knows nothing of radixkv."""
