"""The error for a wrong command line."""


class UsageError(ValueError):
    """`khvdrun` cannot do what it was asked for; the text says why."""
