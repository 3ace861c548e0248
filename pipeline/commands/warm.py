"""What `python -m pipeline.load --warm DIR` does: compile an export ahead of time, so that it can be shipped.

Works for machines whose key (`pipeline.compile_cache.key`) is that of this one. No TensorFlow.
"""

import json
import time
from pathlib import Path

import numpy as np
from absl import flags

from models.errors import InputError
from models.export_spec import Size
from pipeline import cli, compile_cache, manifest
from pipeline.benchmark import timing


def define_flags() -> None:
    """Flags of the command."""
    flags.DEFINE_string("warm", None, "Folder to fill with what XLA compiles, for --compile_cache.")
    flags.DEFINE_string("models", "exports/emoji", "Export to compile.")
    flags.DEFINE_integer("version", None, "Version of the export. Default: the newest.")
    flags.DEFINE_list("jit_components", ",".join(manifest.DEFAULT_JIT_COMPONENTS), "Of text_encoder, unet, decoder.")
    for name in ("height", "width"):
        flags.DEFINE_integer(name, None, f"{name.capitalize()} in pixels. Default: the export's first size.")


def run() -> None:
    """Define the command's flags and run it."""
    define_flags()
    cli.run(main)


def main(argv):
    place = compile_cache.folder(flags.FLAGS.warm)
    if len(argv) > 1 or place is None:
        raise InputError(
            "expected --warm DIR and no other arguments: python -m pipeline.load --warm DIR --models EXPORT"
        )
    contract = manifest.read(flags.FLAGS.models, flags.FLAGS.version)
    manifest.verify(contract)
    size = manifest.pick_size(contract, flags.FLAGS.width, flags.FLAGS.height)
    components = tuple(flags.FLAGS.jit_components)
    manifest.check_jit_components(components)
    names = [name for component in components for name in manifest.JIT_COMPONENTS[component]]
    run = compile_cache.start(place, contract.export_id)
    if run is None or run.locked is None:
        raise InputError(f"{place}: nothing can be added there")
    wanted = {f"{name} {size}" for name in names}
    record = _read_warm(run.place)
    if wanted <= set(record["functions"]) and set(record["programs"]) <= set(compile_cache.check(run.place)[0]):
        print(f"nothing to do: {', '.join(names)} at {size} are there")
    else:
        _compile(contract, components, size, names)
        with compile_cache.lock(run.folder):
            compile_cache.keep(run.place, run.links)
            record = {
                "functions": sorted(wanted | set(record["functions"])),
                "programs": sorted(compile_cache.check(run.place)[0]),
            }
            timing.write_json(run.place / compile_cache.WARM_FILE, record)
    print(f"{run.place}: {len(record['programs'])} programs, {compile_cache.size_of(run.place) / 1e6:.1f} MB")


def _read_warm(place: Path) -> dict:
    """What earlier runs compiled: functions, and the programs that were there then; damaged, nothing."""
    try:
        record = json.loads((place / compile_cache.WARM_FILE).read_text())
        return {name: list(record[name]) for name in ("functions", "programs")}
    except (OSError, ValueError, KeyError, TypeError):
        return {"functions": [], "programs": []}


def _compile(contract: manifest.Manifest, components: tuple[str, ...], size: Size, names: list[str]) -> None:
    """Call each function once on zeros, which are in the range of all inputs; no row of a table is run."""
    cli.import_tensorflow()
    from pipeline import load

    functions = load.local(
        contract.folder, True, components, contract.version, verify=False, width=size.width, height=size.height
    )
    for name in names:
        part, signature = manifest.chain_signature(contract.spec, name, size)
        inputs = contract.signatures[part][signature].inputs
        start_time = time.perf_counter()
        getattr(functions, name)(**{spec.name: np.zeros(spec.shape, spec.dtype) for spec in inputs})
        print(f"{name}: {time.perf_counter() - start_time:.1f} s", flush=True)
