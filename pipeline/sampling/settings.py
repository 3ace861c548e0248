"""How to draw: the settings of a run, checked against an export, and the steps table they make. No TensorFlow."""

import dataclasses

import numpy as np

from models.errors import InputError
from models.steps import ROW
from pipeline.manifest import Manifest
from pipeline.sampling import samplers, schedules
from pipeline.sampling.schedules import Options


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to draw: everything but the prompt and the seed."""

    sampler: str
    num_steps: int
    guidance_scale: float
    guidance_rescale: float = 0.0
    guidance_start: float = 0.0  # guided are the rows in [start, end) of the run, as fractions of it
    guidance_end: float = 1.0
    options: Options = schedules.DEFAULT
    strength: float | None = None  # of image to image: the share of the steps that is made; None: from noise

    @property
    def first_step(self) -> int | None:
        """The step that image to image starts with, rounded as diffusers does; None: from noise."""
        return None if self.strength is None else self.num_steps - int(self.num_steps * self.strength)


STRENGTH = 0.8  # diffusers' default


def settings(
    manifest: Manifest,
    sampler: str | None = None,
    num_steps: int | None = None,
    guidance_scale: float | None = None,
    guidance_rescale: float = 0.0,
    guidance_start: float = 0.0,
    guidance_end: float = 1.0,
    options: Options = schedules.DEFAULT,
    strength: float | None = None,
    image_to_image: bool = False,
) -> Settings:
    """Return settings with the export's defaults for whatever is None; a list in `options` has its own number of steps.

    Raises:
        InputError: a guidance that is no finite number, or a strength that leaves no step or comes without a picture.
    """
    defaults = manifest.config.defaults
    if num_steps is None:
        num_steps = defaults.num_steps if options.num_steps is None else options.num_steps
    chosen = Settings(
        sampler=sampler or defaults.sampler,
        num_steps=num_steps,
        guidance_scale=float(defaults.guidance_scale if guidance_scale is None else guidance_scale),
        guidance_rescale=float(guidance_rescale),
        guidance_start=float(guidance_start),
        guidance_end=float(guidance_end),
        options=options,
        strength=STRENGTH if strength is None and image_to_image else strength,
    )
    if not np.isfinite(chosen.guidance_scale) or not 0 <= chosen.guidance_rescale <= 1:
        raise InputError(
            f"guidance_scale must be a finite number and guidance_rescale within 0..1, found "
            f"{chosen.guidance_scale} and {chosen.guidance_rescale}"
        )
    if not 0 <= chosen.guidance_start <= chosen.guidance_end <= 1:
        raise InputError(
            f"guidance_start and guidance_end must be 0 <= start <= end <= 1, found {chosen.guidance_start:g} and "
            f"{chosen.guidance_end:g}"
        )
    _check_strength(chosen, image_to_image)
    return chosen


def _check_strength(chosen: Settings, image_to_image: bool) -> None:
    if chosen.strength is None:
        return
    if not image_to_image:
        raise InputError(f"strength is {chosen.strength:g}, but there is no init_image to change")
    if not 0 < chosen.strength <= 1:
        raise InputError(f"strength must be above 0 and at most 1, found {chosen.strength:g}")
    if chosen.first_step == chosen.num_steps:
        raise InputError(
            f"strength {chosen.strength:g} makes none of {chosen.num_steps} steps; it must be at least "
            f"1/{chosen.num_steps}, or give more steps"
        )


def table(manifest: Manifest, chosen: Settings) -> tuple[samplers.Steps, np.ndarray]:
    """Return the steps of a run and their table f32[S, 39]; rows outside the guidance interval have g = 0.

    The interval is Kynkäänniemi et al. 2024, arXiv:2404.07724, in fractions of the run.

    Raises:
        InputError: an unknown sampler, an option it does not take, or a step count outside the export's 1..max_steps.
    """
    spec, scheduler = manifest.spec, manifest.config.scheduler
    steps, rows = samplers.steps_table(
        chosen.sampler, scheduler, chosen.num_steps, spec.max_steps, chosen.options, chosen.first_step
    )
    position = np.arange(len(steps.rows)) / len(steps.rows)
    outside = (position < chosen.guidance_start) | (position >= chosen.guidance_end)
    for filled in (steps.rows, rows):
        filled[: len(position)][outside, ROW["g"]] = 0.0
    return steps, rows
