"""Which sequence computes which tokens in the next step: requests in, plain numbers out. No tensors."""
