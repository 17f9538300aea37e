"""What is cached: prefix caches over token ids and block ids. No tensors, no requests, no allocator, no torch."""
