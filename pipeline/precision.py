"""What half precision and 8-bit weights cost: parts run in float32 as well, results that are not finite refused."""

import numpy as np

from models.errors import InputError
from pipeline.compare import Difference, compare

# Signatures that show a part's numbers as they are: once through the network, nothing rounded to pixels.
COMPARED = ("encode", "unet", "decode_float", "encode_image")


def check_finite(part: str, outputs: dict[str, dict[str, np.ndarray]], dtype: str) -> None:
    """Refuse a part whose results hold NaN or infinity.

    Args:
        outputs: signature -> output name -> array.

    Raises:
        InputError: names the signature and what to do.
    """
    for name, arrays in outputs.items():
        if all(np.isfinite(a).all() for a in arrays.values() if a.dtype.kind == "f"):
            continue
        vae = part in ("decoder", "image_encoder")
        advice = {
            "float16": "--dtype bfloat16" + (", or --vae with one that is safe in float16" if vae else ""),
            "bfloat16": "--dtype float32",
            "float32": "another checkpoint; these weights cannot draw",
        }[dtype]
        raise InputError(f"{part}/{name}: NaN or infinite values in {dtype}: numbers too large for it; try {advice}")


def differences(
    part: str, exact: dict[str, dict[str, np.ndarray]], outputs: dict[str, dict[str, np.ndarray]], what: str
) -> dict[str, Difference]:
    """PART/SIGNATURE -> how far results are from those in float32; each is printed, `what` saying which results."""
    found = {}
    for name, expected in exact.items():
        difference = found[f"{part}/{name}"] = compare(expected, outputs[name])
        psnr = "equal" if difference.psnr is None else f"PSNR {difference.psnr:.1f} dB"
        print(f"{part}/{name}: {what} against float32: max abs {difference.max_abs:.3g}, {psnr}", flush=True)
    return found
