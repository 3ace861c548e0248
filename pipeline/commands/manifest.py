"""Show what an export can do: python -m pipeline.manifest exports/emoji."""

from absl import flags

from models.errors import InputError
from pipeline import cli, manifest


def run() -> None:
    """Define the command's flags and run it."""
    flags.DEFINE_integer("version", None, "Version of the export. Default: the newest.")
    cli.run(main)


def main(argv):
    if len(argv) != 2:
        raise InputError(f"expected one folder, found {len(argv) - 1}: python -m pipeline.manifest exports/emoji")
    print(manifest.describe(manifest.read(argv[1], flags.FLAGS.version)))
