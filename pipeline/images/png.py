"""Pictures as PNG files that say how they were made. No TensorFlow."""

import io
import json
import os
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

from models.errors import InputError
from pipeline.manifest import Functions
from pipeline.sampling import samplers
from pipeline.sampling.settings import Settings


def parameters(
    functions: Functions, prompt: str, negative: str | None, seed: int, chosen: Settings, guidance_scale: float
) -> str:
    """Return how a picture was made, as the `parameters` text that AUTOMATIC1111's readers understand."""
    contract = functions.manifest
    lines = [prompt] + ([f"Negative prompt: {negative}"] if negative else [])
    fields = {
        "Steps": chosen.num_steps,
        "Sampler": samplers.SAMPLERS[chosen.sampler].label,
        "CFG scale": f"{guidance_scale:g}",
        "Seed": seed,
        **_sampling_fields(functions, chosen),
        **_guidance_fields(chosen),
        "Size": str(functions.size),
        "Model": contract.checkpoint,
        "Model hash": contract.export_id[:10],
        **({"VAE hash": contract.vae.sha256[:10], "VAE": contract.vae.name} if contract.vae else {}),
        # AUTOMATIC1111 counts the last layer as the first to skip to: its 1 skips none.
        **({"Clip skip": contract.clip_skip + 1} if contract.clip_skip else {}),
        **({"Denoising strength": f"{chosen.strength:g}"} if chosen.strength is not None else {}),
        "RNG": "NV",
    }
    fields = {key: _quoted(value) for key, value in fields.items()}
    if contract.loras:
        # Not "Lora hashes": readers would look for <lora:...> in the prompt. Quoted, because of the commas.
        loras = ", ".join(f"{lora.name} {lora.sha256[:12]} {lora.weight:g}" for lora in contract.loras)
        fields["Merged LoRA"] = json.dumps(loras, ensure_ascii=False)
    return "\n".join([*lines, ", ".join(f"{key}: {value}" for key, value in fields.items())])


def _quoted(value: object) -> str:
    """Return a value as AUTOMATIC1111 quotes it, so that readers find where it ends."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(mark in text for mark in ',:\n\r"') else text


def _sampling_fields(functions: Functions, chosen: Settings) -> dict[str, object]:
    """The options that made a difference, by AUTOMATIC1111's names where it has them."""
    options = chosen.options
    schedule = samplers.resolved(chosen.sampler, functions.manifest.config.scheduler, options).sigma_schedule
    fields = {
        "Schedule type": schedule.capitalize() if schedule != "uniform" and options.num_steps is None else None,
        "Eta DDIM": f"{options.eta:g}" if options.eta else None,
        "Timestep spacing": options.timestep_spacing,
        # No commas, which separate the fields.
        "Timesteps": " ".join(f"{value:g}" for value in options.timesteps or ()),
        "Sigmas": " ".join(f"{value:g}" for value in options.sigmas or ()),
    }
    return {key: value for key, value in fields.items() if value}


def _guidance_fields(chosen: Settings) -> dict[str, str]:
    fields = {
        "CFG rescale": (chosen.guidance_rescale, 0.0),
        "Guidance start": (chosen.guidance_start, 0.0),
        "Guidance end": (chosen.guidance_end, 1.0),
    }
    return {name: f"{value:g}" for name, (value, usual) in fields.items() if value != usual}


SHEET_CELL = 192  # pixels, about; small pictures are enlarged to it


def save_sheet(pictures: np.ndarray, columns: int, path: Path) -> Path:
    """Write pictures side by side as one PNG, over an older one.

    Args:
        pictures: uint8[n, H, W, 3]. columns: pictures in a row.

    Raises:
        InputError: the file cannot be written.
    """
    count, height, width, _ = pictures.shape
    scale = max(1, SHEET_CELL // height)
    sheet = Image.new("RGB", (columns * width * scale, -(-count // columns) * height * scale), "white")
    for i, picture in enumerate(pictures):
        cell = Image.fromarray(picture).resize((width * scale, height * scale), Image.Resampling.LANCZOS)
        sheet.paste(cell, (i % columns * cell.width, i // columns * cell.height))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path, format="PNG")
    except OSError as error:
        raise InputError(f"--sheet {path}: cannot be written ({_reason(error)})") from error
    return path


def previews(folder: Path) -> Path:
    """Return the folder of the previews beside pictures in `folder`."""
    return folder / "previews"


def save_preview(image: np.ndarray, name: str, folder: Path) -> Path:
    """Write what a picture looks like on its way as previews/NAME.png, whole at every moment, over an older one.

    Args:
        image: uint8[H, W, 3].

    Raises:
        InputError: the folder cannot be written.
    """
    path = previews(folder) / f"{name}.png"
    temporary = path.with_name(f".{os.getpid()}.png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            Image.fromarray(image).save(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path.parent}: cannot write previews there ({_reason(error)})") from error
    return path


def save(image: np.ndarray, seed: int, text: str, folder: Path) -> Path:
    """Write one picture as NNNNN-SEED.png, NNNNN the next free number; nothing is ever overwritten.

    Args:
        image: uint8[H, W, 3]. text: goes into the PNG's `parameters` chunk.

    Raises:
        InputError: the folder cannot be written.
    """
    information = PngImagePlugin.PngInfo()
    # Latin-1 fits a tEXt chunk, which every reader knows; anything else needs iTXt.
    if text.isascii():
        information.add_text("parameters", text)
    else:
        information.add_itxt("parameters", text)
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG", pnginfo=information)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(p.name.split("-")[0]) for p in folder.glob("*-*.png") if p.name.split("-")[0].isdecimal()]
        number = max(numbers, default=-1) + 1
        while True:
            path = folder / f"{number:05}-{seed}.png"
            try:
                # Fails where another process just wrote, on every file system.
                file = path.open("xb")
            except FileExistsError:
                number += 1
            else:
                break
        try:
            with file:
                file.write(content.getvalue())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"{folder}: cannot write pictures there ({_reason(error)})") from error
    return path


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
