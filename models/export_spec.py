"""What an export fixes, as plain data. No TensorFlow, no Keras."""

import dataclasses

from models.config import ModelConfig
from models.errors import InputError


@dataclasses.dataclass(frozen=True)
class Size:
    """Pixels of a picture."""

    width: int
    height: int

    def __str__(self):
        return f"{self.width}x{self.height}"


@dataclasses.dataclass(frozen=True)
class ExportSpec:
    """What an export fixes. Sampler, step count, spacing, guidance and seeds stay free."""

    height: int  # pixels
    width: int
    prompts: int  # P, prompts per call
    images_per_prompt: int  # M; image r belongs to prompt r // M
    dtype: str  # of the stored weights, one of DTYPES
    max_steps: int  # S, rows of the steps table
    prompt_chunks: int = 1  # k, blocks of 77 tokens in a prompt
    more_sizes: tuple[Size, ...] = ()  # pictures that the same weights also draw, each by signatures of its own
    weights: str = "dtype"  # "dtype", or "int8": kernels stored as 8-bit integers, multiplied out at each use
    target: str = "any"  # "any", or "cpu": computed, and kernels stored, as is faster on processors; float32 only

    @property
    def size(self) -> Size:
        """The size that signatures without a suffix have."""
        return Size(self.width, self.height)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """All sizes, the main one first."""
        return (self.size, *self.more_sizes)

    @property
    def exact(self) -> "ExportSpec":
        """The same without what makes pictures differ from float32's."""
        return dataclasses.replace(self, dtype="float32", weights="dtype", target="any")

    @property
    def precision(self) -> str:
        """What makes numbers differ, in words."""
        changes = [self.dtype] + ["int8 weights"] * (self.weights == "int8")
        return ", ".join(changes + ["tuned for processors"] * (self.target == "cpu"))

    def signature(self, name: str, size: Size) -> str:
        """What signature `name` is called for one of the sizes: denoise, denoise_768x512."""
        return name if size == self.size else f"{name}_{size}"

    @property
    def num_images(self) -> int:
        """N, images per call."""
        return self.prompts * self.images_per_prompt

    def check(self, config: ModelConfig) -> None:
        """Raise InputError for a size, count or dtype that cannot be exported."""
        step = config.vae.downscale
        for size in self.sizes:
            for name in ("height", "width"):
                value = getattr(size, name)
                if value < step or value % step:
                    below = max(step, value // step * step)
                    nearest = f"{below} or {below + step}"
                    raise InputError(f"--{name} {value}: must be a multiple of {step}; nearest: {nearest}")
        if len(set(self.sizes)) < len(self.sizes):
            raise InputError(f"--sizes {','.join(map(str, self.sizes))}: names a size twice")
        for name, most in COUNTS.items():
            if not 1 <= getattr(self, name) <= most:
                raise InputError(f"--{name} {getattr(self, name)}: must be 1..{most}")
        if not 1 <= self.max_steps <= config.scheduler.num_train_timesteps:
            raise InputError(f"--max_steps {self.max_steps}: must be 1..{config.scheduler.num_train_timesteps}")
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}")
        if self.weights not in WEIGHTS:
            raise InputError(f"--weights {self.weights}: must be one of {', '.join(WEIGHTS)}")
        if self.target not in TARGETS:
            raise InputError(f"--target {self.target}: must be one of {', '.join(TARGETS)}")
        if self.target == "cpu" and (self.dtype, self.weights) != ("float32", "dtype"):
            raise InputError("--target cpu computes in float32: give it neither another --dtype nor --weights int8")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, shape (None: any size) and dtype of one tensor at a signature's border."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("dtype", "int8")
TARGETS = ("any", "cpu")
# Of an ExportSpec: field -> most.
COUNTS = {"prompts": 1024, "images_per_prompt": 1024, "prompt_chunks": 16}
