"""Whether the rows of a benchmark draw what they should, and how far those that approximate are off. No TensorFlow."""

import dataclasses
import hashlib
import typing

import numpy as np

from models.families import FAMILIES, kerascv_numerics
from pipeline import compare
from pipeline.benchmark.timing import TOTAL


class Expected(typing.NamedTuple):
    """What a row should draw."""

    whose: str  # "plain", the same without XLA; "ours", where a peer starts from our noise; "exact", not approximated
    name: str  # of the row that drew it
    images: np.ndarray  # uint8[N, H, W, 3]


def label(row: dict) -> str:
    """A row's name, with a star where its call path is not that of the exports."""
    return row["name"] + ("*" if row["kind"] != "export" else "")


def networks(contract) -> str:
    """What a manifest's export computes, rounding apart, as a name; "sd1" where KerasCV's class computes the same."""
    spec = dataclasses.replace(contract.spec, target="any")
    ours, theirs = kerascv_numerics(contract.config), kerascv_numerics(FAMILIES["sd1"])
    same = all(getattr(ours, part) == getattr(theirs, part) for part in ("text_encoder", "unet", "vae"))
    if same and spec == spec.exact:
        return "sd1"
    changes = (contract.loras, contract.embeddings, contract.vae, contract.clip_skip)
    return f"{contract.checkpoint}, {spec.precision}" + (f", {changes}" if any(changes) else "")


def same_work(a: dict, b: dict) -> bool:
    """Whether two rows compute the same pictures by the same networks, in one dtype."""
    keys = ("networks", "images", "height", "width", "dtype", "unet_calls")
    same_guidance = _guidance(a) == _guidance(b)
    return same_guidance and all(a[key] == b[key] for key in keys)


def _guidance(row: dict) -> tuple:
    chosen = row["settings"]
    return chosen["guidance_scale"], chosen.get("guidance_start", 0.0), chosen.get("guidance_end", 1.0)


def expected(row: dict, done: list[tuple[dict, list[dict]]]) -> Expected | None:
    """What a row should draw, if that has been drawn.

    Args:
        row: what was asked for.
        done: other rows and the answers of `timing.isolated` to them.
    """
    whose, fits = "plain", _is_plain_of
    if row.get("same_noise"):
        whose, fits = "ours", _is_ours_of
    elif row.get("approximate"):
        whose, fits = "exact", _is_exact_of
    drawn = (
        Expected(whose, other["name"], answer["images"])
        for other, answers in done
        for answer in answers
        if fits(other, row) and "images" in answer
    )
    return next(drawn, None)


def _is_plain_of(other: dict, row: dict) -> bool:
    return row["jit_compile"] and not other["jit_compile"] and other["of"] == row["of"]


def _is_ours_of(other: dict, row: dict) -> bool:
    return other["kind"] == "export" and same_work(other, row)


def _is_exact_of(other: dict, row: dict) -> bool:
    """The same checkpoint asked for the same pictures in the same dtype, with nothing left out."""
    if (
        other["kind"] != "export"
        or other.get("approximate")
        or other["export"]["checkpoint"] != row["export"]["checkpoint"]
    ):
        return False
    shapes = all(other[key] == row[key] for key in ("images", "height", "width", "dtype"))
    ours, exact = ({**entry["settings"], "guidance_start": 0.0, "guidance_end": 1.0} for entry in (row, other))
    return shapes and ours == exact


def picture(images: np.ndarray, wanted: Expected | None) -> dict:
    """What was drawn, uint8[N, H, W, 3]: its hash, and how far it is from what it should be.

    In levels of 255; of an approximation also PSNR in dB (None where equal) and `compare.ssim` (None where too small).
    """
    result = {"sha256": hashlib.sha256(images.tobytes()).hexdigest()}
    if wanted is None or wanted.images.shape != images.shape:
        return result
    levels = np.abs(images.astype(int) - wanted.images.astype(int))
    result |= {f"{name}_levels_from_{wanted.whose}": float(getattr(np, name)(levels)) for name in ("max", "mean")}
    if wanted.whose == "exact":
        mean_square = np.mean(levels**2)
        result["exact"] = wanted.name
        result["psnr"] = float(10 * np.log10(255**2 / mean_square)) if mean_square else None
        large = min(images.shape[1:3]) >= len(compare.WINDOW)
        result["ssim"] = compare.ssim(wanted.images, images) if large else None
    return result


PHRASES = {"plain": "the plain row's picture", "ours": "our picture", "exact": "the exact picture"}
ENDS = {"plain": "", "ours": ", from the same noise", "exact": ""}


def notes(rows: list[dict]) -> list[str]:
    """One line for each measured row that was compared; what an approximation costs stands beside what it gives."""
    lines = []
    for whose, phrase in PHRASES.items():
        for row in rows:
            found = row["picture"]
            if f"max_levels_from_{whose}" in found:
                largest, mean = (found[f"{kind}_levels_from_{whose}"] for kind in ("max", "mean"))
                line = f"{label(row)} draws {phrase} to {largest:.0f} of 255 levels, {mean:.3g} on average{ENDS[whose]}"
                lines.append(line + (_gain(row, rows) if whose == "exact" else ""))
    return lines


def _gain(row: dict, rows: list[dict]) -> str:
    found = row["picture"]
    psnr = "equal" if found["psnr"] is None else f"PSNR {found['psnr']:.1f} dB"
    text = f": {psnr}" + (f", SSIM {found['ssim']:.3f}" if found["ssim"] is not None else "")
    exact = [other for other in rows if _is_exact_of(other, row) and _same_way(other, row)]
    if exact:
        stages = [row["stages"][stage]["p50"] / exact[0]["stages"][stage]["p50"] for stage in (TOTAL, "diffusion")]
        text += f", in {stages[0]:.2f} x the seconds of {exact[0]['name']} (diffusion {stages[1]:.2f} x)"
    return text


def _same_way(a: dict, b: dict) -> bool:
    return all(a.get(key) == b.get(key) for key in ("jit_compile", "environment", "server"))


def approximations(spec) -> str:
    """What an `ExportSpec` leaves out, rounding apart, in words; empty where nothing."""
    exact = dataclasses.replace(spec.exact, dtype=spec.dtype, target=spec.target)
    return "" if spec == exact else spec.precision
