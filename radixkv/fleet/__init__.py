"""Many replicas: which of them holds which prefix, and where a request should go; simulated and on Ray."""
