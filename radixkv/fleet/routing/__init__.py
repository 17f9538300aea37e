"""Which replica holds which prefix, and where a request should go. No torch; no sockets until one is asked for."""
