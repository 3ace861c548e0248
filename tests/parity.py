"""Compare an export with diffusers (PyTorch, CPU, float32): every component, and whole chains from the same noise.

python tests/parity.py --peers .venv-peers/bin/python --family sd1

Without --checkpoint a full-size model of the family with seeded random weights is written first. The checkpoint is
exported by serialize_savedmodels.py, and the reloaded export is compared. diffusers runs in its own environment
(`make peers`). Exit code 1 when a bar is missed, or when the run would prove nothing because the
picture does not depend on prompt and guidance. With two processor cores about an hour for each family; XL, whose
weights fill 13 GB in float32, at 256x256.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from pipeline import generate, load, manifest  # noqa: E402
from pipeline.compare import compare  # noqa: E402
from pipeline.prompts import tokenizer  # noqa: E402
from pipeline.sampling import noise  # noqa: E402

PROMPT, OTHER_PROMPT = "a red apple on a blue background", "a cactus, white background"
NEGATIVE_PROMPT = "blurry, low quality"
GUIDANCE_SCALE = 7.5
TIMESTEP = 501
SEED = 0
SAMPLERS = ("ddim", "euler")
PIXELS = {"sd1": 512, "sd2": 512, "sdxl": 256}  # a side of the picture; XL must fit beside its weights

TEXT_MAX_ABS = 1e-4  # relative to max(1, max|reference|)
COMPONENT_PSNR = 80.0  # dB
CHAIN_PSNR = 50.0  # dB
UNET_STD = (0.5, 2.0)
LEAST_CHANGE = 5.0  # grey levels, mean abs


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: what was measured and what is asked of it."""

    name: str
    measured: tuple[str, ...]  # max abs, mean abs, PSNR; or one entry of another kind
    bar: str
    passed: bool | None  # None: for information


def main() -> int:
    arguments = parse_arguments()
    work = arguments.work_dir.resolve()
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = (arguments.checkpoint or work / arguments.family).resolve()
    if not checkpoint.exists():
        words = ROOT / "checkpoints" / "emoji" / "tokenizer"
        peer(arguments, "write_checkpoint.py", checkpoint, "--family", arguments.family, "--tokenizer", words)
    exported = arguments.export or export(checkpoint, work, arguments)
    reference = read_reference(checkpoint, work, arguments)
    rows = meaningfulness(reference) + components(exported, reference) + chains(exported, reference, arguments)
    print_table(rows, reference, manifest.read(exported), arguments)
    return 0 if all(row.passed is not False for row in rows) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, help="Python of an environment with diffusers")
    parser.add_argument("--checkpoint", type=Path, help="folder in diffusers' layout; default: random, full size")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "build" / "parity")
    parser.add_argument("--export", type=Path, help="compare this export instead of making one")
    parser.add_argument("--reference", type=Path, help="compare with this output of reference.py instead of running it")
    parser.add_argument("--family", choices=PIXELS, default="sd1", help="which model is written and compared")
    parser.add_argument("--height", type=int, help="pixels; default: 512, of XL 256")
    parser.add_argument("--width", type=int)
    parser.add_argument("--num_steps", type=int, default=10)
    parser.add_argument("--jit_compile", action="store_true", help="run our chains with XLA")
    arguments = parser.parse_args()
    for name in ("height", "width"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, PIXELS[arguments.family])
    return arguments


def peer(arguments: argparse.Namespace, script: str, *more) -> None:
    """Run a script of tests/peers in the peers' environment."""
    command = [str(arguments.peers), str(ROOT / "tests" / "peers" / script), *map(str, more)]
    subprocess.run(command, check=True)


def export(checkpoint: Path, work: Path, arguments: argparse.Namespace) -> Path:
    """Export by the script that users run; always anew, because the code may have changed."""
    folder = work / f"{checkpoint.name}-{arguments.width}x{arguments.height}"
    shutil.rmtree(folder, ignore_errors=True)
    flags = {
        "checkpoint": checkpoint,
        "output_dir": folder,
        "height": arguments.height,
        "width": arguments.width,
        "dtype": "float32",
    }
    script = ROOT / "serialize_savedmodels.py"
    subprocess.run([sys.executable, str(script), *(f"--{k}={v}" for k, v in flags.items())], check=True, cwd=ROOT)
    return folder


def read_reference(checkpoint: Path, work: Path, arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    """diffusers' numbers, computed or, with --reference, read; always those of this very request."""
    names = ("inputs.npz", "request.json", "reference.npz")
    inputs, request_file, output = (work / f"{checkpoint.name}-{name}" for name in names)
    request = make_request(checkpoint, inputs, arguments)
    request_file.write_text(json.dumps(request, indent=1), encoding="utf-8")
    blocks = json.loads((checkpoint / "vae" / "config.json").read_text(encoding="utf-8"))["block_out_channels"]
    downscale = 2 ** (len(blocks) - 1)
    np.savez(inputs, noise=noise.initial_latents([SEED], arguments.height // downscale, arguments.width // downscale))
    if arguments.reference is None:
        peer(arguments, "reference.py", request_file, output)
    reference = dict(np.load(arguments.reference or output))
    found = json.loads(str(reference["request"]))
    for name in ("checkpoint", "inputs"):
        del found[name], request[name]
    if found != request:
        raise SystemExit(f"{arguments.reference}: made for another request: found {found}, expected {request}")
    return reference


def make_request(checkpoint: Path, inputs: Path, arguments: argparse.Namespace) -> dict:
    """What reference.py shall compute; see there."""
    ddim = {"sampler": "ddim", "num_steps": arguments.num_steps, "guidance_scale": GUIDANCE_SCALE}
    return {
        "checkpoint": str(checkpoint),
        "inputs": str(inputs),
        "height": arguments.height,
        "width": arguments.width,
        "timestep": TIMESTEP,
        "prompts": [PROMPT],
        "negative_prompts": [NEGATIVE_PROMPT],
        "chains": {
            "ddim": ddim,
            "euler": ddim | {"sampler": "euler"},
            "other prompt": ddim | {"prompts": [OTHER_PROMPT]},
            "guidance 1": ddim | {"guidance_scale": 1.0},
        },
    }


def meaningfulness(reference: dict[str, np.ndarray]) -> list[Row]:
    """Whether the pictures depend on what they should depend on; on diffusers' side alone."""
    deviations = np.concatenate([reference[name] for name in reference if name.endswith("/unet_std")])
    deviations = np.append(deviations, reference["prediction"].std())
    (low, high), least, most = UNET_STD, deviations.min(), deviations.max()
    rows = [
        Row(
            "std of the UNet's outputs",
            (f"{least:.2f}..{most:.2f}",),
            f"{low}..{high}",
            bool(low <= least <= most <= high),
        )
    ]
    base = reference["ddim/image"].astype("float64")
    for name in ("other prompt", "guidance 1"):
        change = float(np.abs(base - reference[f"{name}/image"]).mean())
        rows.append(
            Row(f"change by {name}", (f"{change:.1f} levels",), f">= {LEAST_CHANGE:g}", bool(change >= LEAST_CHANGE))
        )
    return rows


def components(exported: Path, reference: dict[str, np.ndarray]) -> list[Row]:
    """Tokenizers, text encoders, UNet and decoder of the reloaded export, on the reference's inputs."""
    contract = manifest.read(exported)
    rows, inputs = [], {}
    for suffix, encoder in zip(("", "_2"), tokenizer.of_export(exported, contract.config), strict=False):
        for name, text in ((f"tokens{suffix}", PROMPT), (f"negative_tokens{suffix}", NEGATIVE_PROMPT)):
            same = np.array_equal(encoder.encode_batch([text])[0], reference[name])
            rows.append(Row(name, ("equal" if same else "different",), "equal", same))
            inputs |= {name: reference[name], f"{name.removesuffix(suffix)[:-1]}_weights": np.ones((1, 77), "float32")}
    contexts = load.function(contract, "text_encoder", "encode")(**inputs)
    for name in contexts:
        rows.append(difference(f"text encoder, {name}", reference[name], contexts[name], max_abs=TEXT_MAX_ABS))

    predict = load.function(contract, "diffusion_model", "unet")
    size, (_, *shape) = [contract.spec.height, contract.spec.width], reference["prediction"].shape
    given = {name: reference[name] for name in contexts if not name.startswith("unconditional_")}
    if "pooled" in given:
        given["time_ids"] = np.float32([[*size, 0, 0, *size]])
    prediction = predict(
        latent=noise.initial_latents([SEED], *shape[:2]), timestep=np.full((1,), TIMESTEP, "float32"), **given
    )["prediction"]
    del predict
    rows.append(difference("UNet", reference["prediction"], prediction, psnr=COMPONENT_PSNR))

    decode_float = load.function(contract, "decoder", "decode_float")
    image = decode_float(latent=reference["ddim/latents"][-1])["image"]
    rows.append(difference("decoder", reference["ddim/float_image"], image, psnr=COMPONENT_PSNR))
    return rows


def chains(exported: Path, reference: dict[str, np.ndarray], arguments: argparse.Namespace) -> list[Row]:
    """Prompt to picture, as pipeline.generate draws it."""
    functions = load.local(exported, arguments.jit_compile, verify=False)
    rows = []
    for sampler in SAMPLERS:
        run = generate.plan(
            functions.manifest,
            PROMPT,
            NEGATIVE_PROMPT,
            SEED,
            guidance_scale=GUIDANCE_SCALE,
            sampler=sampler,
            num_steps=arguments.num_steps,
        )
        contexts = generate.encode(functions, run, run.calls[0])
        latent = generate.denoise(functions, run, run.calls[0], contexts, progress=tick, steps_per_call=1)
        image = generate.decode(functions, latent)
        name = f"{arguments.num_steps} {sampler} steps"
        rows.append(difference(f"{name}, latent", reference[f"{sampler}/latents"][-1], latent))
        rows.append(difference(f"{name}, image", reference[f"{sampler}/image"], image, psnr=CHAIN_PSNR))
    return rows


def tick(steps: int) -> None:
    print("." * steps, end="", flush=True)


def difference(name, reference, found, max_abs: float | None = None, psnr: float | None = None) -> Row:
    """A row of the table; bars that are None are not asked for."""
    reference = np.asarray(reference)
    measured = compare({name: reference}, {name: np.asarray(found)})
    scale = max(1.0, float(np.abs(reference.astype("float64")).max()))
    # `<=` and `>=`: NaN fails.
    passed, bar = None, ""
    if max_abs is not None:
        passed, bar = measured.max_abs <= max_abs * scale, f"max abs <= {max_abs:g} x {scale:.3g}"
    if psnr is not None:
        passed, bar = measured.psnr is None or measured.psnr >= psnr, f"PSNR >= {psnr:g} dB"
    decibels = "equal" if measured.psnr is None else f"{measured.psnr:.1f}"
    return Row(name, (f"{measured.max_abs:.3g}", f"{measured.mean_abs:.3g}", decibels), bar, passed)


def print_table(rows: list[Row], reference, contract: manifest.Manifest, arguments) -> None:
    spec, versions = contract.spec, json.loads(str(reference["versions"]))
    print(
        f"\n{contract.checkpoint}, {spec.width}x{spec.height}, {arguments.num_steps} steps, "
        f"guidance {GUIDANCE_SCALE}, {'XLA' if arguments.jit_compile else 'plain'}; "
        f"{', '.join(f'{name} {version}' for name, version in (contract.versions | versions).items())}"
    )
    print(f"{'':<36}{'max abs':>11}{'mean abs':>10}{'PSNR dB':>10}   bar")
    verdicts = {True: "ok", False: "FAILED", None: ""}
    for row in rows:
        measured = "".join(f"{entry:>{31 // len(row.measured)}}" for entry in row.measured)
        print(f"{row.name:<36}{measured:>31}   {row.bar:<26}{verdicts[row.passed]}")


if __name__ == "__main__":
    sys.exit(main())
