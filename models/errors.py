"""What goes wrong because of what the user gave; every room may import it."""


class InputError(ValueError):
    """What the user gave cannot be used. The message is one line: expected, found, where, what to do."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
