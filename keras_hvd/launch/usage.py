"""What is raised for a wrong command line."""


class UsageError(ValueError):
    """`khvdrun` was asked for something that it cannot do; the text says what."""
