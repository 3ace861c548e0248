"""Sizes read from a checkpoint's own files, and what is refused by name."""

import dataclasses
import json
import shutil

import pytest

from models.errors import InputError
from models.families import FAMILIES, kerascv_numerics
from pipeline.checkpoints import diffusers_folder

SD1_FILES = {
    "text_encoder/config.json": {
        "vocab_size": 49408,
        "max_position_embeddings": 77,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-05,
    },
    "unet/config.json": {
        "sample_size": 64,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": [320, 640, 1280, 1280],
        "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
        "layers_per_block": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 768,
        "norm_num_groups": 32,
        "norm_eps": 1e-05,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "act_fn": "silu",
        "downsample_padding": 1,
        "mid_block_scale_factor": 1,
        "center_input_sample": False,
    },
    # As published in 2022: no scaling_factor, no force_upcast.
    "vae/config.json": {
        "sample_size": 512,
        "act_fn": "silu",
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
        "norm_num_groups": 32,
    },
    "scheduler/scheduler_config.json": {
        "_class_name": "PNDMScheduler",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "timestep_spacing": "leading",
        "skip_prk_steps": True,
        "trained_betas": None,
        "clip_sample": False,
    },
}


@pytest.fixture(scope="module")
def sd1_folder(tmp_path_factory):
    """The config files of a published Stable Diffusion 1.x folder, without weights."""
    folder = tmp_path_factory.mktemp("sd1")
    write_json(folder / "model_index.json", {"_class_name": "StableDiffusionPipeline"})
    for name, content in SD1_FILES.items():
        write_json(folder / name, content)
    return folder


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def changed(sd1_folder, tmp_path):
    """Function (file, **changes) -> a folder with these keys changed; a value of ... removes the key."""

    def change(name, **changes):
        folder = tmp_path / "changed"
        shutil.copytree(sd1_folder, folder, dirs_exist_ok=True)
        content = json.loads((folder / name).read_text()) | changes
        write_json(folder / name, {key: value for key, value in content.items() if value is not ...})
        return folder

    return change


def test_a_published_folder_is_the_family_spelled_out(sd1_folder):
    assert diffusers_folder.read_config(sd1_folder) == FAMILIES["sd1"]


def test_heads_are_under_diffusers_misleading_name(changed):
    """attention_head_dim is the number of heads: 8 heads of 40, 80 and 160."""
    unet = diffusers_folder.read_config(changed("unet/config.json")).unet
    assert unet.num_attention_heads == (8, 8, 8, 8)
    sizes = [c // h for c, h in zip(unet.block_out_channels, unet.num_attention_heads, strict=True)]
    assert sizes == [40, 80, 160, 160]
    sd2 = diffusers_folder.read_config(changed("unet/config.json", attention_head_dim=[5, 10, 20, 20])).unet
    assert [c // h for c, h in zip(sd2.block_out_channels, sd2.num_attention_heads, strict=True)] == [64] * 4
    # Where a file has the right name too, it wins, as in diffusers.
    both = diffusers_folder.read_config(changed("unet/config.json", num_attention_heads=10)).unet
    assert both.num_attention_heads == (10,) * 4


def test_sizes_and_defaults_of_a_checkpoint_win(changed):
    folder = changed("unet/config.json", sample_size=32)
    write_json(folder / "generation_config.json", {"sampler": "euler", "num_inference_steps": 4})
    config = diffusers_folder.read_config(folder)
    assert config.default_size == 256
    assert dataclasses.asdict(config.defaults) == {"sampler": "euler", "num_steps": 4, "guidance_scale": 7.5}
    folder = changed("vae/config.json", scaling_factor=0.13025, force_upcast=False)
    assert diffusers_folder.read_config(folder).vae.scaling_factor == 0.13025
    assert not diffusers_folder.read_config(folder).vae.force_upcast


def test_what_a_scheduler_file_leaves_open_stays_open(changed):
    folder = changed(
        "scheduler/scheduler_config.json",
        timestep_spacing=...,
        steps_offset=...,
        set_alpha_to_one=None,
        clip_sample=...,
    )
    scheduler = diffusers_folder.read_config(folder).scheduler
    assert (scheduler.timestep_spacing, scheduler.steps_offset, scheduler.set_alpha_to_one) == (None, None, None)
    assert scheduler.prediction_type == "epsilon"


def test_a_solver_s_settings_are_read(changed):
    folder = changed(
        "scheduler/scheduler_config.json",
        **{"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++", "solver_order": 3},
        **{"solver_type": "heun", "lower_order_final": False, "euler_at_final": True, "use_karras_sigmas": True},
        **{"use_lu_lambdas": False, "lambda_min_clipped": -float("inf"), "variance_type": None, "flow_shift": 1.0},
    )
    config = diffusers_folder.read_config(folder)
    scheduler = config.scheduler
    assert (scheduler.solver_order, scheduler.solver_type, scheduler.sigma_schedule) == (3, "heun", "karras")
    assert (scheduler.lower_order_final, scheduler.euler_at_final) == (False, True)
    assert config.defaults.sampler == "dpmpp_3m"
    lcm = {"_class_name": "LCMScheduler", "original_inference_steps": 40, "timestep_scaling": 10}
    config = diffusers_folder.read_config(changed("scheduler/scheduler_config.json", **lcm))
    assert (config.scheduler.original_inference_steps, config.scheduler.timestep_scaling) == (40, 10.0)
    assert config.defaults.sampler == "lcm" and config.scheduler.sigma_schedule == "uniform"


REFUSED = [
    ("unet/config.json", {"in_channels": 6}, "in_channels is 6; supported: 4"),
    ("unet/config.json", {"in_channels": 9}, "in_channels is 9: an inpainting model; supported are models with 4"),
    ("unet/config.json", {"in_channels": 8}, "in_channels is 8: an InstructPix2Pix model"),
    ("unet/config.json", {"addition_embed_type": "text_time"}, "key 'addition_time_embed_dim' is missing"),
    ("unet/config.json", {"cross_attention_dim": 1024}, "make a context of width 768, the unet takes 1024"),
    ("unet/config.json", {"act_fn": "gelu"}, "act_fn is 'gelu'; supported: 'silu'"),
    ("unet/config.json", {"resnet_time_scale_shift": "scale_shift"}, "resnet_time_scale_shift is 'scale_shift'"),
    ("unet/config.json", {"down_block_types": ["DownBlock2D"] * 3}, "4 block_out_channels need as many down_block_ty"),
    ("unet/config.json", {"up_block_types": ["CrossAttnUpBlock2D"] * 4}, "up_block_types mirroring them"),
    ("unet/config.json", {"down_block_types": [["DownBlock2D"]] * 4}, "down_block_types"),
    ("unet/config.json", {"attention_head_dim": [8, 8]}, r"attention_head_dim should be 4 integers, found \[8, 8\]"),
    ("unet/config.json", {"attention_head_dim": 7}, "attention_head_dim"),
    ("unet/config.json", {"attention_head_dim": 0}, "attention_head_dim"),
    ("unet/config.json", {"block_out_channels": ["320"] * 4}, "block_out_channels"),
    ("unet/config.json", {"block_out_channels": []}, "block_out_channels"),
    ("unet/config.json", {"block_out_channels": [300, 600, 1200, 1200]}, "block_out_channels.*norm_num_groups"),
    ("unet/config.json", {"layers_per_block": True}, "layers_per_block should be int, found True"),
    ("unet/config.json", {"layers_per_block": -1}, "layers_per_block"),
    ("unet/config.json", {"cross_attention_dim": ...}, "key 'cross_attention_dim' is missing"),
    ("vae/config.json", {"latent_channels": 16}, "latent_channels is 16; supported: 4"),
    ("vae/config.json", {"use_quant_conv": False}, "use_quant_conv is False; supported: True"),
    ("vae/config.json", {"shift_factor": 0.1}, "shift_factor = 0.1 is not supported"),
    ("vae/config.json", {"scaling_factor": "0.18"}, "scaling_factor should be float, found '0.18'"),
    ("vae/config.json", {"block_out_channels": [100] * 4}, "block_out_channels.*norm_num_groups"),
    ("text_encoder/config.json", {"hidden_act": "relu"}, "hidden_act is 'relu'; supported: 'quick_gelu' or 'gelu'"),
    ("text_encoder/config.json", {"max_position_embeddings": 248}, "max_position_embeddings is 248; supported: 77"),
    ("text_encoder/config.json", {"num_attention_heads": 7}, "num_attention_heads"),
    ("scheduler/scheduler_config.json", {"clip_sample": True}, "clip_sample = True is not supported"),
    ("scheduler/scheduler_config.json", {"thresholding": True}, "thresholding = True is not supported"),
    ("scheduler/scheduler_config.json", {"prediction_type": "sample"}, "prediction_type is 'sample'; supported"),
    ("scheduler/scheduler_config.json", {"beta_schedule": "squaredcos_cap_v2"}, "beta_schedule is"),
    ("scheduler/scheduler_config.json", {"use_beta_sigmas": True}, "use_beta_sigmas = True is not supported"),
    ("scheduler/scheduler_config.json", {"algorithm_type": "dpmsolver"}, "algorithm_type is 'dpmsolver'; supported"),
    ("scheduler/scheduler_config.json", {"skip_prk_steps": False}, "skip_prk_steps is False; supported: True"),
    ("scheduler/scheduler_config.json", {"predict_x0": False}, "predict_x0 is False; supported: True"),
    ("scheduler/scheduler_config.json", {"solver_order": 4}, "solver_order is 4; supported: 1 or 2 or 3"),
    (
        "scheduler/scheduler_config.json",
        {"use_karras_sigmas": True, "use_exponential_sigmas": True},
        "use_karras_sigmas and use_exponential_sigmas exclude each other",
    ),
    # diffusers would fall back to betas no Stable Diffusion has.
    ("scheduler/scheduler_config.json", {"beta_start": ...}, "key 'beta_start' is missing"),
    (
        "model_index.json",
        {"_class_name": "StableDiffusionXLImg2ImgPipeline"},
        "the refiner of Stable Diffusion XL; text",
    ),
    ("model_index.json", {"_class_name": "FluxPipeline"}, "found 'FluxPipeline'; text-to-image checkpoints of"),
    ("model_index.json", {"_class_name": ["StableDiffusionPipeline"]}, r"found \['StableDiffusionPipeline'\]"),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"), REFUSED, ids=lambda v: next(iter(v)) if type(v) is dict else ""
)
def test_what_is_not_built_is_refused_by_name(changed, name, changes, message):
    folder = changed(name, **changes)
    with pytest.raises(InputError, match=message) as error:
        diffusers_folder.read_config(folder)
    assert str(folder / name) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "\xff\xfe", "[" * 100_000], ids=["empty", "cut", "list", "bytes", "deep"]
)
def test_damaged_config_files(changed, text):
    folder = changed("vae/config.json")
    (folder / "vae" / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"vae/config\.json: expected a JSON"):
        diffusers_folder.read_config(folder)


def test_missing_config_file(changed):
    folder = changed("unet/config.json")
    (folder / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(InputError, match=r"scheduler_config\.json: expected a JSON file, found none"):
        diffusers_folder.read_config(folder)


def test_kerascv_numerics_change_only_what_is_named():
    reference, other = FAMILIES["sd1"], kerascv_numerics(FAMILIES["sd1"])
    assert other.numerics == "kerascv" and reference.numerics == "reference"
    assert (other.unet.transformer_norm_eps, other.unet.geglu_act, other.vae.norm_eps) == (1e-5, "gelu_tanh", 1e-5)
    assert (reference.unet.transformer_norm_eps, reference.unet.geglu_act, reference.vae.norm_eps) == (
        1e-6,
        "gelu",
        1e-6,
    )
    assert other.unet.norm_eps == reference.unet.norm_eps == 1e-5
    assert other.text_encoder == reference.text_encoder
    # A step grid of its own, walked by DDIM.
    assert (other.defaults.sampler, reference.defaults.sampler) == ("ddim", "pndm")
    assert dataclasses.replace(other.defaults, sampler="pndm") == reference.defaults


SPEC_ERRORS = [
    ({"height": 100}, "--height 100: must be a multiple of 8; nearest: 96 or 104"),
    ({"width": 0}, "--width 0: must be a multiple of 8; nearest: 8 or 16"),
    ({"width": -64}, "--width -64: must be a multiple of 8"),
    ({"prompts": 0}, "--prompts 0: must be 1..1024"),
    ({"images_per_prompt": 1025}, "--images_per_prompt 1025"),
    ({"max_steps": 0}, r"--max_steps 0: must be 1\.\.1000"),
    ({"max_steps": 1001}, r"--max_steps 1001: must be 1\.\.1000"),
    ({"dtype": "int8"}, "--dtype int8: must be one of float32, bfloat16, float16"),
]


@pytest.mark.parametrize(("changes", "message"), SPEC_ERRORS)
def test_specs_that_cannot_be_exported(export_spec, changes, message):
    spec = export_spec(**{"height": 512, "width": 512} | changes)
    with pytest.raises(InputError, match=message):
        spec.check(FAMILIES["sd1"])


@pytest.mark.parametrize(("height", "width"), [(64, 64), (72, 56), (8, 8), (512, 768)])
def test_any_multiple_of_eight_is_a_size(export_spec, height, width):
    export_spec(height=height, width=width).check(FAMILIES["sd1"])
