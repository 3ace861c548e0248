"""The denoising loop: runs the rows of a steps table (`models.steps`).

The table, the range of rows and the guidance are inputs, so one compiled program serves every sampler,
step count and range, and rows 0..k then k..n equal rows 0..n bit for bit.
"""

import math

import numpy as np
from keras import ops

from models.config import SchedulerConfig
from models.steps import ROW, STATE


def denoise(
    unet,
    latent,
    memory,
    steps,
    first_step,
    last_step,
    guidance,
    guidance_rescale,
    seed,
    conditioning,
    prepare=lambda **conditioning: conditioning,
):
    """Run rows first_step..last_step-1 of a steps table.

    Args:
        unet: function (latent f32[B,h,w,4], timestep f32[B], **prepared) -> prediction f32[B,h,w,4], B = 2N, or N
            without guidance.
        latent: f32[N,h,w,4], z0. memory: f32[4,N,h,w,4], z1..z4.
        steps: f32[S,39]. first_step, last_step: int32[], 0 <= first <= last <= S; otherwise the result is NaN.
        guidance: f32[N], weight of (conditional - unconditional) added to the conditional prediction:
            guidance_scale - 1 (Ho and Salimans 2022, arXiv:2207.12598). A row's g multiplies it. None: the
            conditional prediction alone, at half the work.
        guidance_rescale: f32[N] in [0, 1] (Lin et al. 2023, arXiv:2305.08891, section 3.4); None with no guidance.
        seed: int32[N,2], low and high word of each image's seed; used by rows with noise.
        conditioning: {name: (conditional, unconditional)}, each [N, ...]; with no guidance {name: (conditional,)}.
        prepare: function (**conditioning of B rows) -> prepared; it runs once, before the loop.

    Returns:
        latent, memory, denoised f32[N,h,w,4] (the last row's estimate of the clean latent).
    """
    total = steps.shape[0]
    in_range = ops.logical_and(first_step >= 0, ops.logical_and(first_step <= last_step, last_step <= total))
    # A compiled graph cannot raise: a wrong range gives NaN, never a wrong picture.
    latent = ops.where(in_range, latent, math.nan)
    # Clamped so that the gather stays inside the table whatever the caller asked for.
    start, stop = ops.maximum(first_step, 0), ops.minimum(last_step, total)
    prepared = prepare(**{name: ops.concatenate(halves, axis=0) for name, halves in conditioning.items()})

    def predict(z0, timestep, g):
        if guidance is None:
            return unet(z0, ops.broadcast_to(timestep, z0.shape[:1]), **prepared)
        both = ops.concatenate([z0, z0], axis=0)
        conditional, unconditional = ops.split(unet(both, ops.broadcast_to(timestep, both.shape[:1]), **prepared), 2)
        # guidance 0 leaves exactly the conditional prediction.
        out = conditional + g * ops.reshape(guidance, (-1, 1, 1, 1)) * (conditional - unconditional)
        return rescale(out, conditional, guidance_rescale)

    state = ops.concatenate([latent[None], memory], axis=0)

    def condition(index, *_):
        return index < stop

    def body(index, state, denoised):
        row = ops.take(steps, index, axis=0)
        timestep, p, q, g = (row[ROW[name]][0] for name in ("timestep", "p", "q", "g"))
        a = ops.reshape(row[ROW["A"]], (STATE, STATE, 1, 1, 1, 1))
        b, c = (ops.reshape(row[ROW[name]], (STATE, 1, 1, 1, 1)) for name in ("B", "C"))

        z0 = state[0]
        denoised = p * z0 + q * predict(z0, timestep, g)
        # Multiply and sum, not a matrix product: accelerators may round that to TF32.
        state = ops.sum(a * state[None], axis=1) + b * denoised[None]
        state = state + c * noise(seed, index, z0.shape, ops.any(c != 0))[None]
        return index + 1, state, denoised

    _, state, denoised = ops.while_loop(condition, body, (start, state, ops.zeros_like(latent)))
    return state[0], state[1:], denoised


def ddim_rows(num_steps, max_steps: int, config: SchedulerConfig, alphas_cumprod: np.ndarray):
    """DDIM's steps table for a step count known only when the graph runs; equals `pipeline.sampling.samplers.ddim`.

    A closed form over arange(max_steps): a range of `num_steps` would compile anew for each count.

    Args:
        num_steps: int32[] in 1..max_steps. config: no None in the fields that DDIM uses.

    Returns:
        f32[max_steps, 39]; rows from num_steps on are NaN. Song et al. 2021, arXiv:2010.02502, eq. 12, eta 0.
    """
    train = config.num_train_timesteps
    i = ops.arange(max_steps, dtype="float64")
    n = ops.cast(num_steps, "float64")
    # Made here: a graph optimiser would simplify (T - T/n) - T to -T/n, which rounds otherwise.
    counts = np.arange(1, max_steps + 1)
    strides = (train - train / counts) - train

    def grid(i):
        if config.timestep_spacing == "leading":
            return (n - 1 - i) * ops.floor(train / n) + config.steps_offset
        if config.timestep_spacing == "trailing":
            # numpy.arange's own arithmetic, whose rounding decides a few steps. The minimum changes nothing, but keeps
            # a compiler from fusing product and sum into one rounding.
            stride = ops.take(strides, ops.clip(num_steps - 1, 0, max_steps - 1))
            return ops.round(train + ops.minimum(i * stride, 0.0)) - 1
        return ops.round((n - 1 - i) * ((train - 1) / ops.maximum(n - 1, 1.0)))

    def alpha(timestep):
        # No product up to here beyond the schedule means a timestep outside it: NaN, never a wrong picture.
        inside = ops.logical_and(timestep >= 0, timestep < train)
        index = ops.cast(ops.clip(timestep, 0, train - 1), "int32")
        return ops.where(inside, ops.take(np.asarray(alphas_cumprod, "float64"), index), math.nan)

    timestep = grid(i)
    a = alpha(timestep)
    final = 1.0 if config.set_alpha_to_one else float(alphas_cumprod[0])
    previous = ops.where(i + 1 < n, alpha(grid(i + 1)), final)
    if config.prediction_type == "epsilon":
        p, q = 1 / ops.sqrt(a), -ops.sqrt(1 - a) / ops.sqrt(a)
    else:
        p, q = ops.sqrt(a), -ops.sqrt(1 - a)
    from_latent = ops.sqrt(1 - previous) / ops.sqrt(1 - a)
    from_denoised = ops.sqrt(previous) - from_latent * ops.sqrt(a)

    zero = ops.zeros_like(i)
    one = ops.ones_like(i)
    unused = STATE * STATE - 1
    columns = [timestep, p, q, one, from_latent, *[zero] * unused, from_denoised, *[zero] * (2 * STATE - 1)]
    rows = ops.stack(columns, axis=1)
    return ops.cast(ops.where(ops.less(i, n)[:, None], rows, math.nan), "float32")


def rescale(out, conditional, guidance_rescale):
    """Pull the guided prediction's standard deviation back to the conditional one's (arXiv:2305.08891, eq. 15-16)."""
    axes = (1, 2, 3)
    amount = ops.reshape(guidance_rescale, (-1, 1, 1, 1))
    ratio = ops.std(conditional, axis=axes, keepdims=True) / ops.std(out, axis=axes, keepdims=True)
    return ops.where(amount > 0, out * (amount * ratio + (1 - amount)), out)


def noise(seed, row, shape, wanted):
    """Standard normal noise of one row of the table: Philox 4x32-10, Box-Muller (Salmon et al. 2011).

    The same integers as `pipeline.sampling.noise.normal` at offset row + 1; normals agree within 2e-6, since
    logarithm and sine differ in their last bits between compilers.

    Args:
        seed: int32[N,2]. row: int32[]. shape: (N, h, w, channels). wanted: bool[]; False gives zeros at no cost.

    Returns:
        f32[N,h,w,channels], drawn per image in [channels, h, w] order.
    """
    images, height, width, channels = shape

    def draw():
        words = ops.cast(seed, "uint32")
        index = ops.cast(ops.arange(channels * height * width, dtype="int32"), "uint32")
        u, v = philox_pair(words, ops.cast(row + 1, "uint32"), index)
        radius = ops.sqrt(-2.0 * ops.log(_unit(u)))
        normal = radius * ops.sin(2 * math.pi * _unit(v))
        return ops.transpose(ops.reshape(normal, (images, channels, height, width)), (0, 2, 3, 1))

    return ops.cond(wanted, draw, lambda: ops.zeros(shape, dtype="float32"))


def _unit(bits):
    """uint32 to float32 in (0, 1)."""
    return ops.cast(bits, "float32") * 2.0**-32 + 2.0**-33


def philox_pair(seed, offset, index):
    """First two words of Philox 4x32-10: key (low, high) of the seed, counter (offset, 0, index, 0).

    Args:
        seed: uint32[N,2]. offset: uint32[]. index: uint32[M].

    Returns:
        Two uint32[N,M].
    """
    low, high = seed[:, :1], seed[:, 1:]
    zero = ops.zeros_like(index)[None] * low
    counter = [zero + offset, zero, zero + index[None], zero]
    key = [low, high]
    for _ in range(10):
        high0, low0 = _multiply(_u32(0xD2511F53), counter[0])
        high1, low1 = _multiply(_u32(0xCD9E8D57), counter[2])
        counter = [
            ops.bitwise_xor(ops.bitwise_xor(high1, counter[1]), key[0]),
            low1,
            ops.bitwise_xor(ops.bitwise_xor(high0, counter[3]), key[1]),
            low0,
        ]
        key = [key[0] + _u32(0x9E3779B9), key[1] + _u32(0xBB67AE85)]
    return counter[0], counter[1]


def _u32(value: int):
    # Every constant as uint32: a Python int beside uint32 silently becomes int64.
    return ops.convert_to_tensor(value, dtype="uint32")


def _multiply(a, b):
    """High and low words of the 64-bit product of uint32 a and b, by 16-bit halves (no 64-bit type on a TPU)."""
    mask, half = _u32(0xFFFF), _u32(16)
    a_low, a_high = ops.bitwise_and(a, mask), ops.right_shift(a, half)
    b_low, b_high = ops.bitwise_and(b, mask), ops.right_shift(b, half)
    middle = a_high * b_low + ops.right_shift(a_low * b_low, half)
    cross = a_low * b_high + ops.bitwise_and(middle, mask)
    return a_high * b_high + ops.right_shift(middle, half) + ops.right_shift(cross, half), a * b
