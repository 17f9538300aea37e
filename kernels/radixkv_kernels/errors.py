"""The package's own exception. A caller's mistake (shape, dtype, range) is a plain ValueError naming the argument."""


class UnsupportedImplementation(NotImplementedError):
    """What was asked for is well formed, but the implementation asked for can't do it; the message says why."""
