"""What goes wrong because of what the user gave; every room may import it."""


class InputError(ValueError):
    """What the user gave cannot be used. The message is one line: expected, found, where, what to do."""
