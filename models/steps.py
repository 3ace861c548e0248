"""The row of a steps table: the one description of it, for those who make rows and for the loop that runs them.

A sampler is data (`pipeline.sampling.samplers`): one row of 39 float32 numbers per model call,

    timestep, p, q, g, A[5, 5], B[5], C[5]

acting on a state z = (z0..z4), z0 the latent in variance-preserving scale and z1..z4 its memory:

    out      = guided UNet output at (z0, timestep), guidance = 1 + g * max(guidance_scale - 1, 0)
    denoised = p z0 + q out
    z       <- A z + B denoised + C noise(seed, row)
"""

from types import MappingProxyType

STATE = 5  # z0..z4
MEMORY = STATE - 1  # z1..z4
ROW = MappingProxyType(
    {
        "timestep": slice(0, 1),
        "p": slice(1, 2),
        "q": slice(2, 3),
        "g": slice(3, 4),
        "A": slice(4, 29),  # [5, 5] row-major: A[i, j] takes z_j into the next z_i
        "B": slice(29, 34),  # [5]
        "C": slice(34, 39),  # [5]
    }
)
ROW_SIZE = 39
