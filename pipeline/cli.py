"""What every command does the same way: help, path flags, errors in one line, and what must act before TensorFlow."""

import inspect
import logging as stdlib_logging
import os
import sys
import textwrap
from collections.abc import Callable, Mapping

from absl import app, flags, logging

from models.errors import InputError

HELP = ("--help", "-help", "-h", "--helpshort", "--helpfull", "-?")

# Flags defined through this module belong to the module that asks for them.
flags.disclaim_key_flags()


def run(main: Callable[[list[str]], object], hints: Mapping[str, str] | None = None) -> None:
    """Run a command: what the user got wrong ends as one line on stderr and exit code 1, not as a traceback.

    Args:
        main: takes the arguments that are no flags; the docstring of its module is what --help prints first.
        hints: unknown flags that people type -> what to do instead.
    """

    def guarded(argv):
        if not flags.FLAGS["verbosity"].present:
            # TensorFlow logs pages of renamed inputs at level INFO when it saves a model.
            logging.set_verbosity(logging.WARNING)
        try:
            result = print(help_text(main)) if argv[1:] == [HELP[0]] else main(argv)
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

    def parse(argv: list[str]) -> list[str]:
        flagged = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
        if any(argument in HELP for argument in flagged):
            return [*flags.FLAGS(argv[:1]), HELP[0]]
        try:
            _check_text(argv)
            return flags.FLAGS(argv)
        except flags.UnrecognizedFlagError as error:
            hint = (hints or {}).get(error.flagname)
            message = f"Unknown command line flag '{error.flagname}'; {hint}" if hint else f"{error}; see --help"
        except flags.Error as error:
            message = f"{error}; see --help"
        except InputError as error:
            message = str(error)
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(1)

    app.run(guarded, flags_parser=parse)


def _check_text(arguments: list[str]) -> None:
    """Refuse arguments that cannot be printed or stored again: Python reads other bytes than UTF-8 as surrogates."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"expected arguments in UTF-8, found {os.fsencode(argument)!r}; type it again in a UTF-8 terminal, or "
                f"rename the file"
            ) from error


def help_text(main: Callable) -> str:
    """Return what a command is for and its flags, in the order of their definitions."""
    lines = [inspect.cleandoc(inspect.getmodule(main).__doc__ or ""), ""]
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        for flag in defined if module.partition(".")[0] != "absl" else ():
            lines.append(f"  --{'[no]' if flag.boolean else ''}{flag.name}")
            shown = flag.default is not None and flag.default is not False and flag.default != []
            text = f"{flag.help} (default: {flag.default_as_str})" if shown else flag.help
            lines += textwrap.wrap(" ".join(text.split()), 112, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


class _PathParser(flags.ArgumentParser):
    """A path; ~ is the user's folder also where no shell has seen it, as in --flag=~/file."""

    def parse(self, argument: str) -> str:
        return os.path.expanduser(argument)


class _PathListParser(flags.ListParser):
    """Paths with commas between them."""

    def parse(self, argument) -> list[str]:
        return [os.path.expanduser(path) for path in super().parse(argument)]


def define_path(name: str, default: str | None, help: str) -> None:
    """Define a flag that names a file or folder."""
    flags.DEFINE(_PathParser(), name, default, help, serializer=flags.ArgumentSerializer())


def define_paths(name: str, default: str | None, help: str) -> None:
    """Define a flag that names several, with commas between them."""
    flags.DEFINE(_PathListParser(), name, default, help, serializer=flags.CsvListSerializer(","))


def define_multi_path(name: str, help: str) -> None:
    """Define a flag that names one and can be given several times."""
    flags.DEFINE_multi(_PathParser(), flags.ArgumentSerializer(), name, [], help)


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
