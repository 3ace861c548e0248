"""Serving an export.

python -m pipeline.serving config EXPORT    write what TF Serving needs beside the SavedModels
python -m pipeline.serving check EXPORT     report what TF Serving would choke on
python -m pipeline.serving serve EXPORT     a local server that speaks TF Serving's protocol

Each explains itself with --help.
"""

import importlib
import sys

from absl import flags

from pipeline import cli

# Each module has define_flags(), which defines its flags, and main(argv). Imported only when asked for.
COMMANDS = {
    "config": "pipeline.serving.files",
    "check": "pipeline.serving.check",
    "serve": "pipeline.serving.serve",
}


def main() -> None:
    """Take the command off the command line, and run it as the scripts of this project run."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command not in COMMANDS:
        print(sys.modules["__main__"].__doc__, file=sys.stdout if command in ("--help", "-h") else sys.stderr)
        sys.exit(0 if command in ("--help", "-h") else 1)
    module = importlib.import_module(COMMANDS[command])
    # Before the flags: --help lists those of the program of this name.
    sys.argv[:2] = [f"pipeline.serving {command}"]
    module.define_flags()
    flags.adopt_module_key_flags(module)
    # What --help prints above the flags.
    sys.modules["__main__"].__doc__ = module.__doc__
    cli.run(module.main)


if __name__ == "__main__":
    main()
