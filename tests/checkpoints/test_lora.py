"""LoRA against diffusers' fused weights for every way to name them, exact values, and files that must be refused."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from models import text_encoder, unet
from models.errors import InputError
from models.families import FAMILIES
from pipeline.checkpoints import loader as checkpoint
from pipeline.checkpoints import lora
from pipeline.checkpoints.keymaps import DIFFUSERS
from pipeline.checkpoints.loader import Tensor

GOLDENS = Path(__file__).parents[1] / "goldens"
SPEC = importlib.util.spec_from_file_location("write_lora", GOLDENS / "write_lora.py")
writer = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writer)
CASES = writer.CASES | {"peft": {"peft": 1.0}}


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDENS / "lora.npz"))


@pytest.fixture(scope="module")
def model(golden):
    """The peers' tiny model: {component: {name: tensor}}, with the text encoder's older prefix on disk."""
    components = {"unet": {}, "text_encoder": {}, "vae": {"decoder.conv_in.weight": tensor(np.zeros((4, 4, 3, 3)))}}
    for component, shapes in json.loads(str(golden["shapes"])).items():
        prefix = "text_model." if component == "text_encoder" else ""
        for name, shape in shapes.items():
            components[component][prefix + name] = tensor(writer.values(name, shape))
    return components


@pytest.fixture
def file_of(golden, tmp_path):
    """Function (name) -> path of a file that a peer wrote."""

    def write(name):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(golden[f"file/{name}"].tobytes())
        if name == "peft":
            (tmp_path / "adapter_config.json").write_bytes(golden["file/peft_config"].tobytes())
        return path

    return write


def tensor(array) -> Tensor:
    array = np.asarray(array, np.float32)
    return Tensor(array.shape, array.dtype, array.copy)


def small(**shapes) -> dict[str, dict[str, Tensor]]:
    """A UNet of zeros with the modules given, name with "__" for ".": shape."""
    return {"unet": {f"{name.replace('__', '.')}.weight": tensor(np.zeros(shape)) for name, shape in shapes.items()}}


def saved(path, tensors, metadata=None) -> Path:
    save_file({name: np.asarray(value) for name, value in tensors.items()}, path, metadata)
    return path


def pair(stem, rank=1, inputs=2, outputs=2, **more):
    """down and up of ones, by kohya's names."""
    down, up = np.ones((rank, inputs), np.float32), np.ones((outputs, rank), np.float32)
    return {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up} | {
        f"{stem}.{k}": v for k, v in more.items()
    }


# === Against diffusers and peft ===


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_equal_the_peers(golden, model, file_of, case):
    loras = [lora.read(file_of(name), weight) for name, weight in CASES[case].items()]
    merged = lora.merge(model, loras)
    names = json.loads(str(golden[f"merged/{case}/names"]))
    changed = {
        f"{component}/{name.removeprefix('text_model.')}": t
        for component, tensors in merged.items()
        for name, t in tensors.items()
        if t is not model[component][name]
    }
    assert changed.keys() == set(names)
    for name, expected in zip(names, golden[f"merged/{case}/samples"], strict=True):
        np.testing.assert_allclose(writer.sample(changed[name].read()), expected, rtol=2e-6, atol=2e-6, err_msg=name)
    assert merged.keys() == model.keys() and all(merged[c].keys() == model[c].keys() for c in model)


@pytest.fixture(scope="module")
def draw():
    """Function ({component: tensors}) -> outputs of our networks filled with them, through the strict loader."""
    sizes, given, sd1 = writer.UNET, writer.inputs(), FAMILIES["sd1"]
    config = dataclasses.replace(
        sd1.unet,
        block_out_channels=tuple(sizes["block_out_channels"]),
        transformer_layers=(1, 0),
        num_attention_heads=(4, 4),
        cross_attention_dim=sizes["cross_attention_dim"],
        norm_num_groups=sizes["norm_num_groups"],
    )
    text = text_encoder.TextEncoder(dataclasses.replace(sd1.text_encoder, **writer.TEXT_ENCODER))
    layers = {"unet": unet.UNet(config), "text_encoder": text}

    def run(components):
        for name, layer in layers.items():
            checkpoint.load([layer], components[name], DIFFUSERS[name], name)
        drawn = layers["unet"](given["latent"], np.float32([301]), given["context"])
        return {"unet": np.asarray(drawn), "text_encoder": np.asarray(text(given["tokens"])[0])}

    return run


@pytest.mark.parametrize("case", ["plain", *CASES])
def test_outputs_equal_the_peers(golden, model, file_of, draw, case):
    loras = [lora.read(file_of(name), weight) for name, weight in CASES.get(case, {}).items()]
    for name, found in draw(lora.merge(model, loras)).items():
        np.testing.assert_allclose(found, golden[f"outputs/{case}/{name}"], rtol=0, atol=1e-4, err_msg=name)


def test_a_text_encoder_without_the_older_prefix_is_the_same_model(model, file_of):
    flat = {name.removeprefix("text_model."): t for name, t in model["text_encoder"].items()}
    for name in ("kohya", "processor", "peft_metadata"):
        loras = [lora.read(file_of(name))]
        expected = lora.merge(model, loras)["text_encoder"]
        found = lora.merge({**model, "text_encoder": flat}, loras)["text_encoder"]
        for key, t in found.items():
            np.testing.assert_array_equal(t.read(), expected[f"text_model.{key}"].read())


# === Exact values ===


@pytest.mark.parametrize(
    ("alpha", "weight", "expected"),
    [
        (np.float32(0.5), 1.0, [[1.5, 3], [2, 4]]),
        (np.float16(0.5), 2.0, [[3, 6], [4, 8]]),
        (np.int64(2), 1.0, [[6, 12], [8, 16]]),
        (np.float32([0.5]), -1.0, [[-1.5, -3], [-2, -4]]),
        (None, 1.0, [[3, 6], [4, 8]]),
    ],
)
def test_alpha_over_rank(tmp_path, alpha, weight, expected):
    tensors = {
        "lora_unet_a.lora_down.weight": np.float32([[1, 2]]),
        "lora_unet_a.lora_up.weight": np.float32([[3], [4]]),
    } | ({} if alpha is None else {"lora_unet_a.alpha": alpha})
    path = saved(tmp_path / "l.safetensors", tensors)
    merged = lora.merge(small(a=(2, 2)), [lora.read(path, weight)])["unet"]["a.weight"]
    assert merged.dtype == np.float32 and merged.shape == (2, 2)
    np.testing.assert_array_equal(merged.read(), np.float32(expected))


def test_alpha_missing_means_each_modules_own_rank(tmp_path):
    tensors = pair("lora_unet_a", 64) | pair("lora_unet_b", 16) | pair("lora_unet_c", 8, alpha=np.float32(2))
    path = saved(tmp_path / "l.safetensors", tensors)
    merged = lora.merge(small(a=(2, 2), b=(2, 2), c=(2, 2)), [lora.read(path)])["unet"]
    # ones @ ones is the rank; factors 1, 1 and 2 / 8.
    assert [merged[f"{name}.weight"].read()[0, 0] for name in "abc"] == [64, 16, 2]


def test_settings_of_peft(tmp_path):
    settings = {"unet.lora_alpha": 4, "unet.r": 2, "unet.alpha_pattern": {"^x.b": 6, "d": 1}, "unet.use_dora": False}
    tensors = {
        key.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): value
        for name in ("a", "x.b", "y.x.b", "e.d", "ad")
        for key, value in pair(f"unet.{name}", 2).items()
    }
    path = saved(tmp_path / "l.safetensors", tensors, {"lora_adapter_metadata": json.dumps(settings)})
    model = small(**dict.fromkeys(("a", "x__b", "y__x__b", "e__d", "ad"), (2, 2)))
    merged = [t.read()[0, 0] for t in lora.merge(model, [lora.read(path)])["unet"].values()]
    # y.x.b ends in x.b: peft matches there in spite of ^, and so do we.
    assert merged == [4, 6, 6, 1, 4]


@pytest.mark.parametrize(
    ("weight", "down", "up"),
    [
        ((3, 2, 3, 3), (2, 2, 3, 3), (3, 2, 1, 1)),
        ((3, 2, 1, 1), (2, 2, 1, 1), (3, 2, 1, 1)),
        ((3, 2, 1, 1), (2, 2), (3, 2)),
        ((3, 2), (2, 2, 1, 1), (3, 2, 1, 1)),
        ((3, 2, 3, 3), (2, 2, 3, 3), (3, 2)),
    ],
)
def test_convolutions(tmp_path, weight, down, up):
    random = np.random.default_rng(0)
    a, b = random.standard_normal(down).astype("float32"), random.standard_normal(up).astype("float32")
    tensors = {"lora_unet_conv.lora_down.weight": a, "lora_unet_conv.lora_up.weight": b}
    path = saved(tmp_path / "l.safetensors", tensors)
    found = lora.merge(small(conv=weight), [lora.read(path)])["unet"]["conv.weight"].read()
    expected = np.einsum("or,rihw->oihw", b.reshape(3, 2), a.reshape(*a.shape[:2], *(a.shape[2:] or (1, 1))))
    np.testing.assert_allclose(found, expected.reshape(weight), rtol=1e-6, atol=1e-6)


def test_weight_0_keeps_every_bit_and_minus_undoes(tmp_path, model, file_of):
    path = file_of("kohya")
    untouched = lora.merge(model, [lora.read(path, 0.0)])
    assert all(untouched[c][name] is t for c, tensors in model.items() for name, t in tensors.items())
    there_and_back = lora.merge(lora.merge(model, [lora.read(path, 0.8)]), [lora.read(path, -0.8)])
    for name, t in there_and_back["unet"].items():
        np.testing.assert_allclose(t.read(), model["unet"][name].read(), rtol=0, atol=1e-6)


def test_half_precision_weights_and_updates_add_in_float32(tmp_path):
    base = Tensor((1, 1), np.dtype(np.float16), lambda: np.float16([[2048]]))
    tensors = {k: v.astype(np.float16) for k, v in pair("lora_unet_a", inputs=1, outputs=1).items()}
    path = saved(tmp_path / "l.safetensors", tensors)
    assert lora.merge({"unet": {"a.weight": base}}, [lora.read(path)])["unet"]["a.weight"].read() == 2049


def test_nothing_is_read_before_it_is_needed(tmp_path):
    def read():
        raise AssertionError("read")

    lazy = {"unet": {"a.weight": Tensor((2, 2), np.dtype(np.float32), read)}}
    merged = lora.merge(lazy, [lora.read(saved(tmp_path / "l.safetensors", pair("lora_unet_a")))])
    with pytest.raises(AssertionError, match="read"):
        merged["unet"]["a.weight"].read()


def test_numbers_of_blocks_in_compvis_names():
    """Stable Diffusion 1.x as its own code numbers it: 12 input blocks, 3 in the middle, 12 output blocks."""
    small_sizes = {"block_out_channels": (8, 16, 16, 16), "cross_attention_dim": 8, "norm_num_groups": 4}
    variables = unet.UNet(dataclasses.replace(FAMILIES["sd1"].unet, **small_sizes)).variables
    names = [v.path.replace("/", ".") for v in variables]
    found = lora._ldm_names([n.removesuffix(".kernel") for n in names if n.endswith(".kernel")])
    expected = {
        "conv_in": "input_blocks.0.0",
        "time_embedding.linear_2": "time_embed.2",
        "down_blocks.0.resnets.1.conv1": "input_blocks.2.0.in_layers.2",
        "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
        "down_blocks.2.attentions.1.proj_in": "input_blocks.8.1.proj_in",
        "down_blocks.3.resnets.1.time_emb_proj": "input_blocks.11.0.emb_layers.1",
        "mid_block.attentions.0.proj_out": "middle_block.1.proj_out",
        "mid_block.resnets.1.conv2": "middle_block.2.out_layers.3",
        "up_blocks.0.upsamplers.0.conv": "output_blocks.2.1.conv",
        "up_blocks.1.upsamplers.0.conv": "output_blocks.5.2.conv",
        "up_blocks.3.resnets.2.conv_shortcut": "output_blocks.11.0.skip_connection",
        "up_blocks.3.attentions.2.transformer_blocks.0.attn2.to_out.0": (
            "output_blocks.11.1.transformer_blocks.0.attn2.to_out.0"
        ),
        "conv_out": "out.2",
    }
    assert expected.items() <= found.items()
    assert len(set(found.values())) == len(found) == sum(n.endswith(".kernel") for n in names)


# === Bad input ===


def test_all_problems_of_a_file_are_one_message(tmp_path):
    tensors = {
        **pair("lora_unet_a"),
        **pair("unet.a"),
        **pair("lora_unet_nowhere"),
        **pair("lora_unet_b", dora_scale=np.ones((2, 1), np.float32)),
        **pair("lora_unet_c", inputs=3),
        "lora_unet_d.lora_up.weight": np.ones((2, 1), np.float32),
        "lora_unet_e.alpha": np.float32(1),
        "transformer.blocks.0.lora_A.weight": np.ones((1, 2), np.float32),
    }
    path = saved(tmp_path / "l.safetensors", tensors)
    with pytest.raises(InputError) as caught:
        lora.merge(small(**dict.fromkeys("abcde", (2, 2))), [lora.read(path)])
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{path}: does not fit this model: ")
    for part in (
        "2 keys given twice: lora_unet_a.lora_down.weight and unet.a.lora_down.weight",
        "3 keys fitting no module of this model: lora_unet_nowhere.lora_down.weight, lora_unet_nowhere.lora_up.weight, "
        "transformer.blocks.0.lora_A.weight",
        "1 keys of DoRA, which is not supported: lora_unet_b.dora_scale",
        "lora_unet_c.lora_up.weight [2, 1] and lora_unet_c.lora_down.weight [1, 3] for c.weight [2, 2]",
        "2 keys without its other half: lora_unet_d.lora_up.weight, lora_unet_e.alpha",
    ):
        assert part in message, message


@pytest.mark.parametrize(
    ("key", "method"),
    [
        ("lora_unet_a.dora_scale", "DoRA"),
        ("lora_unet_a.lora_mid.weight", "Tucker"),
        ("lora_unet_a.hada_w1_a", "LoHa"),
        ("lora_unet_a.diff_b", "full differences"),
        ("unet.a.lora_B.bias", "biases"),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path, key, method):
    path = saved(tmp_path / "l.safetensors", pair("lora_unet_a") | {key: np.ones((2, 2), np.float32)})
    with pytest.raises(InputError, match=f"1 keys of {method}.*not supported: {key}"):
        lora.merge(small(a=(2, 2)), [lora.read(path)])


@pytest.mark.parametrize("stem", ["lora_te2_text_model_encoder_layers_0_mlp_fc1", "text_encoder_2.layers.0.mlp.fc1"])
def test_two_text_encoders_are_refused_where_there_is_one(tmp_path, stem):
    path = saved(tmp_path / "l.safetensors", pair("lora_unet_a") | pair(stem))
    with pytest.raises(InputError, match="made for a model with two text encoders .* this one has one"):
        lora.merge(small(a=(2, 2)), [lora.read(path)])


def test_two_text_encoders_are_told_apart_where_there_are_two(tmp_path):
    name = "encoder.layers.0.mlp.fc1"
    model = {c: {f"text_model.{name}.weight": tensor(np.zeros((2, 2)))} for c in ("text_encoder", "text_encoder_2")}
    underscored = f"text_model_{name.replace('.', '_')}"
    for stems in ([f"lora_te{i}_{underscored}" for i in (1, 2)], [f"{c}.text_model.{name}" for c in model]):
        path = saved(tmp_path / "l.safetensors", pair(stems[0]) | pair(stems[1], 5))
        merged = lora.merge(model, [lora.read(path)])
        assert [merged[c][f"text_model.{name}.weight"].read()[0, 0] for c in model] == [1, 5]


def test_another_family_is_refused_by_its_shapes(tmp_path):
    stem = "lora_unet_attn2_to_k"
    path = saved(tmp_path / "l.safetensors", pair(stem, 4, inputs=1024, outputs=320))
    with pytest.raises(InputError, match=r"not fitting in shape.*\[4, 1024\].*\[320, 768\].*made for its family"):
        lora.merge(small(attn2__to_k=(320, 768)), [lora.read(path)])


def test_underscores_are_not_guessed(tmp_path):
    path = saved(tmp_path / "l.safetensors", pair("lora_unet_x_y"))
    for name in ("x.y", "x_y"):
        merged = lora.merge({"unet": {f"{name}.weight": tensor(np.zeros((2, 2)))}}, [lora.read(path)])
        assert merged["unet"][f"{name}.weight"].read()[0, 0] == 1
    both = {"unet": {f"{name}.weight": tensor(np.zeros((2, 2))) for name in ("x.y", "x_y")}}
    with pytest.raises(ValueError, match="lora_unet_x_y is both"):
        lora.merge(both, [lora.read(path)])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_updates_that_are_not_finite(tmp_path, value):
    tensors = pair("lora_unet_a")
    tensors["lora_unet_a.lora_up.weight"][0] = value
    merged = lora.merge(small(a=(2, 2)), [lora.read(saved(tmp_path / "l.safetensors", tensors))])
    with pytest.raises(InputError, match="l.safetensors: the update of unet.a holds NaN or infinite values"):
        merged["unet"]["a.weight"].read()


@pytest.mark.parametrize("alpha", [np.float32(np.nan), np.float32([1, 2])])
def test_alpha_is_one_number(tmp_path, alpha):
    path = saved(tmp_path / "l.safetensors", pair("lora_unet_a", alpha=alpha))
    with pytest.raises(InputError, match="lora_unet_a.alpha should be one finite number"):
        lora.merge(small(a=(2, 2)), [lora.read(path)])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "lora_adapter_metadata is not JSON"),
        ("[]", "lora_adapter_metadata should be an object, found list"),
        ('{"unet.use_rslora": true}', "its settings ask for unet.use_rslora, which is not supported"),
        ('{"unet.lora_alpha": "4"}', "lora_alpha of a should be one finite number, found 4"),
        ('{"unet.alpha_pattern": {"a|b": 4}}', "alpha_pattern 'a|b' is not the name of a module"),
        ('{"unet.alpha_pattern": [1]}', "alpha_pattern should be an object, found list"),
    ],
)
def test_damaged_settings(tmp_path, metadata, message):
    path = saved(tmp_path / "l.safetensors", pair("unet.a"), {"lora_adapter_metadata": metadata})
    with pytest.raises(InputError) as caught:
        lora.merge(small(a=(2, 2)), [lora.read(path)])
    assert message in str(caught.value)


def test_pefts_own_file_needs_its_settings(tmp_path, file_of):
    path = file_of("peft")
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(InputError, match="adapter_config.json: expected a JSON file, found none"):
        lora.read(path)


def test_files_that_hold_no_lora(tmp_path):
    with pytest.raises(InputError, match="does not fit this model: it holds no LoRA"):
        lora.merge(small(a=(2, 2)), [lora.read(saved(tmp_path / "empty.safetensors", {}))])
    path = saved(tmp_path / "unet.safetensors", {"a.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(InputError, match="1 keys fitting no module of this model: a.weight"):
        lora.merge(small(a=(2, 2)), [lora.read(path)])


def test_options(tmp_path):
    path = saved(tmp_path / "a:b.safetensors", pair("lora_unet_a"))
    assert [lora.parse(f"{path}{rest}").weight for rest in ("", ":0.8", ":-1")] == [1.0, 0.8, -1.0]
    assert lora.parse(f"{path}:2").path == path
    for rest in (":strong", ":", ":nan", ":inf"):
        with pytest.raises(InputError, match=f"{rest}: expected FILE or FILE:WEIGHT with a number"):
            lora.parse(f"{path}{rest}")
    with pytest.raises(InputError, match="nowhere.safetensors:0.5: no such file"):
        lora.parse(f"{tmp_path}/nowhere.safetensors:0.5")
    (tmp_path / "old.pt").write_bytes(b"\x80")
    with pytest.raises(InputError, match="old.pt: pickle files can run code"):
        lora.parse(f"{tmp_path}/old.pt:0.5")
