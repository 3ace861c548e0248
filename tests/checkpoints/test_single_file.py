"""Single files in the original naming: both layouts fill the same weights, and what is no such file is refused.

That names go where diffusers' converter puts them is tests/test_checkpoint_keys.py; its lists also make the files here.
"""

import dataclasses
import re
import types
import zlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.errors import InputError
from models.families import FAMILIES
from pipeline.checkpoints import keymaps, loader
from pipeline.checkpoints import single_file as ldm
from pipeline.checkpoints import source as sources
from pipeline.prompts import tokenizer

UNET = "model.diffusion_model."


# Layers of text encoders and transformers that the tiny models keep; Stable Diffusion 2.x's last one is known by its
# number.
LAYERS = {"sd1": 2, "sd2": 24, "sdxl": 3}
DEPTH = 2


def narrow(family):
    """A family's model, small: 32 groups and heads of 64 are what the original naming cannot tell."""
    known = FAMILIES[family]
    size = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 1, "eos_token_id": 99}
    size["num_hidden_layers"] = LAYERS[family] - (family == "sd2")
    second = known.text_encoder_2 and dataclasses.replace(known.text_encoder_2, **size, projection_dim=40)
    channels = (32, 64, 96, 96)[: len(known.unet.block_out_channels)]
    return dataclasses.replace(
        known,
        text_encoder=dataclasses.replace(known.text_encoder, **size),
        text_encoder_2=second,
        unet=dataclasses.replace(
            known.unet,
            block_out_channels=channels,
            transformer_layers=tuple(min(n, DEPTH) for n in known.unet.transformer_layers),
            mid_transformer_layers=min(known.unet.mid_transformer_layers, DEPTH),
            num_attention_heads=(8,) * 4 if family == "sd1" else (1,) * len(channels),
            cross_attention_dim=64 * (1 + bool(second)),
            pooled_dim=40 if second else None,
        ),
        vae=dataclasses.replace(known.vae, block_out_channels=(32, 64, 96, 96)),
    )


class Variable:
    """Stands in for one of Keras' variables, which take far longer to make."""

    dtype = "float32"

    def __init__(self, path, shape):
        self.path, self.shape, self.value = path, shape, None

    def assign(self, array):
        assert array.shape == self.shape and array.dtype == self.dtype
        self.value = array.copy()


def torch_layout(variable, values):
    """(diffusers' name, values as it stores them) of one variable."""
    name, kind = variable.path.replace("/", ".").rpartition(".")[::2]
    if kind == "kernel":
        values = values.transpose(3, 2, 0, 1) if values.ndim == 4 else values.T
    return f"{name}.{'bias' if kind in ('bias', 'beta') else 'weight'}", values


@dataclasses.dataclass
class Tiny:
    config: object
    layers: dict  # component -> layers
    values: dict  # component -> {path: values}
    tensors: dict  # component -> {diffusers' name: values}: the diffusers layout
    arrays: dict  # name -> values: the same as a single file


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, checkpoint_list, variable_shapes):
    config = narrow(request.param)
    layers, values, tensors = {}, {}, {}
    for component, shapes in variable_shapes(config).items():
        variables = [Variable(path, shape) for path, shape in shapes.items()]
        layers[component] = [types.SimpleNamespace(variables=variables)]
        values[component] = {v.path: random(f"{component}.{v.path}", v.shape) for v in variables}
        tensors[component] = dict(torch_layout(v, values[component][v.path]) for v in variables)
    return Tiny(
        config, layers, values, tensors, single_file(request.param, checkpoint_list(f"{request.param}.ldm"), tensors)
    )


def random(name, shape):
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype("float32")


def single_file(family, sections, tensors):
    """Name -> array: what the list says each name holds, put together from diffusers' tensors."""
    parts, made = {}, {}
    rows = [(component, prefix, row) for component, (prefix, rows) in sections.items() for row in rows]
    for component, prefix, (name, shape, _, target, *how) in rows:
        number = re.search(r"(?:resblocks|encoder\.layers|(transformer_blocks))\.(\d+)", name)
        if number and int(number[2]) >= (DEPTH if number[1] else LAYERS[family]):
            continue
        array = tensors[component].get(target.removeprefix("text_model."))
        axes = shape.count("x") + 1
        if array is None:  # what is not built; its values must not matter
            assert target == "-" or re.search(r"encoder\.layers\.2|final_layer_norm", target)
            made[prefix + name] = np.full((96, 64)[:axes], np.nan, "float32")
        elif how and how != ["T"]:
            parts.setdefault(prefix + name, []).append(array)
        else:
            array = array.T if how else array
            made[prefix + name] = array.reshape(array.shape + (1,) * (axes - array.ndim))
    # The lists have queries, keys and values in the order of their rows.
    return made | {name: np.concatenate(arrays) for name, arrays in parts.items()}


def source(arrays):
    return {name: loader.Tensor(a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()}


def assert_loads(tiny, config, tensors, expected):
    """These tensors fill the layers with these values."""
    for component, parts in tiny.layers.items():
        if component in tensors:
            loader.load(parts, tensors[component], keymaps.of_component(component, config), "file")
            found = {v.path: v.value for part in parts for v in part.variables}
            assert found.keys() == expected[component].keys()
            assert all(np.array_equal(found[path], values) for path, values in expected[component].items())


def test_both_layouts_fill_the_same_weights(tiny, tmp_path):
    """Through a file in half precision, as most are; sizes come from its shapes."""
    half = ml_dtypes.bfloat16
    rounded = {c: {path: v.astype(half).astype("float32") for path, v in t.items()} for c, t in tiny.values.items()}
    folder = {c: source({name: a.astype(half) for name, a in t.items()}) for c, t in tiny.tensors.items()}
    assert_loads(tiny, tiny.config, folder, rounded)
    assert_loads(tiny, tiny.config, {c: source(t) for c, t in tiny.tensors.items()}, tiny.values)

    path = tmp_path / "any-name.safetensors"
    save_file({name: np.ascontiguousarray(a.astype(half)) for name, a in tiny.arrays.items()}, path)
    read = ldm.read(loader.read_safetensors(path), "file")
    assert read.config == tiny.config
    assert_loads(tiny, read.config, read.tensors, rounded)


def test_other_spellings(tiny):
    """Names of diffusers inside the VAE, matrices for 1x1 convolutions, a projection stored as a layer, no prefix."""
    changed, count = {}, 0
    for name, array in tiny.arrays.items():
        for spelling in (("q", "to_q"), ("k", "key"), ("v", "to_v"), ("proj_out", "to_out.0"), ("norm", "group_norm")):
            name, found = re.subn(rf"mid\.attn_1\.{spelling[0]}\.", f"mid.attn_1.{spelling[1]}.", name)
            count += found
            if found and array.ndim == 4:
                array = array[:, :, 0, 0]
        if name == "conditioner.embedders.1.model.text_projection":
            name, array = f"{name}.weight", array.T
        changed[name.replace(".transformer.text_model.", ".transformer.")] = array
    assert count == 20
    read = ldm.read(source(changed), "file")
    assert read.config == tiny.config
    assert_loads(tiny, read.config, read.tensors, tiny.values)


def test_averaged_copies_on_request(tiny):
    plain = {name: array for name, array in tiny.arrays.items() if name.startswith(UNET)}
    copies = {f"model_ema.diffusion_model{n.removeprefix(UNET).replace('.', '')}": a + 1 for n, a in plain.items()}
    both = source(tiny.arrays | copies | {"model_ema.decay": np.float32(1), "model_ema.num_updates": np.int32(1)})
    averaged = {path: values + 1 for path, values in tiny.values["unet"].items()}
    for ema, expected in ((True, averaged), (False, tiny.values["unet"])):
        read = ldm.read(both, "file", ema=ema)
        assert_loads(tiny, read.config, {"unet": read.tensors["unet"]}, {"unet": expected})

    with pytest.raises(InputError, match=r"file: --ema takes model_ema\.\*, found no averaged copies; leave --ema out"):
        ldm.read(source(tiny.arrays), "file", ema=True)
    del both["model_ema.diffusion_modelout2bias"]
    with pytest.raises(InputError, match="found no model_ema.diffusion_modelout2bias; leave"):
        ldm.read(both, "file", ema=True)
    both["model_ema.strange"] = both["model_ema.diffusion_modelout2bias"] = both["model_ema.decay"]
    with pytest.raises(InputError, match="file: 1 tensors that are not known: model_ema.strange"):
        ldm.read(both, "file", ema=True)


SCHEDULE = """betas alphas_cumprod alphas_cumprod_prev sqrt_alphas_cumprod sqrt_one_minus_alphas_cumprod
log_one_minus_alphas_cumprod sqrt_recip_alphas_cumprod sqrt_recipm1_alphas_cumprod posterior_variance
posterior_log_variance_clipped posterior_mean_coef1 posterior_mean_coef2 lvlb_weights logvar scale_factor global_step
denoiser.sigmas model_ema.decay model_ema.num_updates""".split()
IGNORED = {
    "sd1": [
        *SCHEDULE,
        "first_stage_model.loss.discriminator.main.0.weight",
        "first_stage_model.loss.logvar",
        "first_stage_model.model_ema.decay",
        "cond_stage_model.logit_scale",
        "cond_stage_model.transformer.text_projection.weight",
        "cond_stage_model.transformer.text_model.embeddings.position_ids",
    ],
    "sd2": [
        "cond_stage_model.model.logit_scale",
        "cond_stage_model.model.text_projection",
        "cond_stage_model.model.transformer.resblocks.23.attn.in_proj_weight",
    ],
    "sdxl": [
        *("v_pred", "ztsnr", "conditioner.embedders.1.model.logit_scale"),
        "conditioner.embedders.0.transformer.text_model.embeddings.position_ids",
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_ignored_and_reported(single_file_keys, family):
    plain, extra = ldm.read(single_file_keys(family), "file"), dict.fromkeys(IGNORED[family], (1,))
    read = ldm.read(single_file_keys(family, extra), "file")
    assert set(read.ignored) == set(plain.ignored) | set(extra)
    assert {c: t.keys() for c, t in read.tensors.items()} == {c: t.keys() for c, t in plain.tensors.items()}


@pytest.mark.parametrize(
    "name", ["betas2", "x.betas", "model.betas", "cond_stage_model.x", "first_stage_model.x.weight"]
)
def test_nothing_else_is_ignored(single_file_keys, name):
    with pytest.raises(InputError, match=f"file: 1 tensors that are not known: {re.escape(name)}"):
        ldm.read(single_file_keys("sd1", {name: (1,)}), "file")


def test_names_that_mean_the_same_are_not_both_taken(single_file_keys):
    name = "first_stage_model.encoder.mid.attn_1.to_q.weight"
    with pytest.raises(InputError, match=f"1 tensors that are not known: {re.escape(name)}"):
        ldm.read(single_file_keys("sd1", {name: (512, 512)}), "file")


def test_a_missing_tensor_is_named(tiny):
    name = f"{UNET}output_blocks.0.0.in_layers.2.weight"
    read = ldm.read(source({n: a for n, a in tiny.arrays.items() if n != name}), "file")
    with pytest.raises(InputError, match=r"file: 1 missing: up_blocks\.0\.resnets\.0\.conv1\.kernel$"):
        assert_loads(tiny, read.config, {"unet": read.tensors["unet"]}, tiny.values)


def test_an_autoencoder_alone(tiny):
    """With and without its prefix, with its discriminator."""
    alone = {n: a for n, a in tiny.arrays.items() if n.startswith("first_stage_model.")}
    bare = {n.removeprefix("first_stage_model."): a for n, a in alone.items()} | {"loss.logvar": np.zeros(())}
    for given in (alone, bare, tiny.arrays):
        found, config = ldm.read_vae(source(given), "file")
        assert config == dataclasses.replace(tiny.config.vae, scaling_factor=0.18215)
        assert_loads(tiny, tiny.config, {"vae": found}, tiny.values)
    with pytest.raises(InputError, match="file: 1 tensors that are not a VAE's: x"):
        ldm.read_vae(source(bare | {"x": np.zeros(())}), "file")


PADDING = {"sd1": [49407], "sd2": [0], "sdxl": [49407, 0]}


def test_a_source_of_an_export(tiny, tmp_path, capsys):
    """Named by its file; CLIP's vocabulary, padded as each text encoder was trained; what is left out is printed."""
    path = tmp_path / "model.safetensors"
    extra = {"model_ema.decay": np.zeros((), "float32")}
    save_file({name: np.ascontiguousarray(a) for name, a in (tiny.arrays | extra).items()}, path)
    source = sources.single_file_source(path, prediction_type="v_prediction")
    assert source.name == "model" and source.config.scheduler.prediction_type == "v_prediction"
    pairs = zip(source.tokenizers.values(), source.config.text_encoders, strict=True)
    loaded = [tokenizer.load(folder, encoder.pad_token or tokenizer.EOS) for folder, encoder in pairs]
    assert [t.pad for t in loaded] == PADDING[source.config.family]
    assert loaded[0].encode("test tokenization").ids[:5].tolist() == [49406, 1628, 32634, 10847, 49407]
    printed = capsys.readouterr().out
    assert "ignored: " in printed and "model_ema.decay" in printed
    assert ("notice: --prediction_type v_prediction is used" in printed) is (source.config.family != "sd2")
    for component, parts in tiny.layers.items():
        source.fill(component, parts)
        found = {v.path: v.value for part in parts for v in part.variables}
        assert all(np.array_equal(found[name], values) for name, values in tiny.values[component].items())


def test_an_export_of_averaged_copies_has_a_name_of_its_own(tiny, tmp_path, capsys):
    plain = {name: array for name, array in tiny.arrays.items() if name.startswith(UNET)}
    copies = {f"model_ema.diffusion_model{n.removeprefix(UNET).replace('.', '')}": a + 1 for n, a in plain.items()}
    path = tmp_path / "model.safetensors"
    save_file({name: np.ascontiguousarray(a) for name, a in (tiny.arrays | copies).items()}, path)
    assert sources.single_file_source(path, ema=True).name == "model-ema"
    assert f"{UNET}* ({len(plain)} tensors)" in capsys.readouterr().out
    assert sources.single_file_source(path).name == "model"
    assert f"model_ema.* ({len(plain)} tensors)" in capsys.readouterr().out


def test_messages_name_the_file_and_its_part(tiny, tmp_path):
    path = tmp_path / "model.safetensors"
    name = f"{UNET}time_embed.0.bias"
    save_file({n: np.ascontiguousarray(a[:5] if n == name else a) for n, a in tiny.arrays.items()}, path)
    wrong = (
        r"model\.safetensors: unet: 1 wrong shape: time_embedding\.linear_1\.bias is float32 \[5\], expected .*\[128\]"
    )
    with pytest.raises(InputError, match=wrong):
        sources.single_file_source(path).fill("unet", tiny.layers["unet"])
