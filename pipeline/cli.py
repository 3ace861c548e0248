"""What every command does the same way: flags that must act before TensorFlow starts, and errors in one line."""

import logging as stdlib_logging
import os
import sys
from collections.abc import Callable

from absl import app, flags, logging

from models.errors import InputError


def run(main: Callable[[list[str]], object]) -> None:
    """`absl.app.run`, but what the user got wrong ends as one line on stderr and exit code 1, not a traceback."""

    def guarded(argv):
        if not flags.FLAGS["verbosity"].present:
            # TensorFlow logs pages of renamed inputs at level INFO when it saves a model.
            logging.set_verbosity(logging.WARNING)
        try:
            result = main(argv)
            sys.stdout.flush()
            return result
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except BrokenPipeError:
            # Whoever read our output (`| head`) has seen enough; what is left must not fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + 13  # as if SIGPIPE had ended us
        except KeyboardInterrupt as error:
            print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
            return 130

    app.run(guarded)


def import_tensorflow() -> None:
    """Import TensorFlow without its start-up chatter, unless the user set TF_CPP_MIN_LOG_LEVEL."""
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return
    # Each program that it finds in its cache of compiled ones it first calls an error, for not being text.
    cached = "--tf_xla_persistent_cache_directory" in os.environ.get("TF_XLA_FLAGS", "")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3" if cached else "2"
    # Its first lines come before its own log level acts, straight to the file descriptor.
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        import tensorflow  # noqa: F401
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def set_flags_before_tensorflow(xla_flags: str | None, tf_xla_flags: str | None) -> None:
    """XLA reads its flags once, when TensorFlow is imported. Raises InputError when that has happened already."""
    wanted = {"XLA_FLAGS": xla_flags, "TF_XLA_FLAGS": tf_xla_flags}
    for name, value in wanted.items():
        if value:
            if "tensorflow" in sys.modules:
                raise InputError(f"{name} must be set before TensorFlow is imported")
            os.environ[name] = f"{os.environ.get(name, '')} {value}".strip()


def print_logs() -> None:
    """Print what the library logs: progress to stdout as it is, warnings to stderr as notices."""

    class Printer(stdlib_logging.Handler):
        def emit(self, record):
            if record.levelno >= stdlib_logging.WARNING:
                print(f"notice: {record.getMessage()}", file=sys.stderr, flush=True)
            else:
                print(record.getMessage(), flush=True)

    for room in ("models", "pipeline"):
        logger = stdlib_logging.getLogger(room)
        logger.setLevel(stdlib_logging.INFO)
        logger.handlers, logger.propagate = [Printer()], False
