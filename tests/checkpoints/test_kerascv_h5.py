"""KerasCV's weight files: read by order, told apart by what they hold, refused when anything is out of place."""

import dataclasses
import importlib.util
import re
import types

import h5py
import keras
import numpy as np
import pytest
from keras import ops
from keras.src.legacy.saving import legacy_h5_format

from models.errors import InputError
from models.families import FAMILIES, kerascv_numerics
from models.text_encoder import ACTIVATIONS, TextEncoder
from models.unet import UNet
from models.vae import VAEDecoder, VAEEncoder
from pipeline.checkpoints import kerascv, kerascv_h5, keymaps, loader
from pipeline.checkpoints import source as sources

needs_kerascv = pytest.mark.skipif(
    importlib.util.find_spec("keras_cv") is None,
    reason="KerasCV is not installed: python -m pip install -r tests/requirements.txt",
)
SECTIONS = {"text_encoder": "text_encoder", "unet": "unet", "vae": "decoder", "vae_encoder": "image_encoder"}
NUMBERS = {"text_encoder": 196, "unet": 686, "vae": 140, "vae_encoder": 108}


@pytest.fixture(scope="module")
def lists(checkpoint_list):
    """Family -> component -> its weights as KerasCV itself lists them: place, class, kind and shape, no values."""

    def weights(rows):
        return [
            kerascv_h5.Weight(f"{layer.lower()}_{place}/{kind}:0", loader.Tensor(shape_of(shape), np.dtype("f4"), None))
            for place, layer, kind, shape in rows
        ]

    return {
        family: {c: weights(checkpoint_list(name)[section][1]) for c, section in SECTIONS.items()}
        for family, name in (("sd1", "kerascv1"), ("sd2", "kerascv2"))
    }


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def write(path, weights, values=lambda name, shape: np.zeros(shape, "f4")):
    """A file as Keras 2 wrote it: groups of layers, an input without weights first, long lists of names in pieces."""
    layers = {}
    for weight in weights:
        layer, _, name = weight.name.rpartition("/")
        layers.setdefault(layer, []).append((name, weight))
    with h5py.File(path, "w") as file:
        legacy_h5_format.save_attributes_to_hdf5_group(file, "layer_names", ["input_1", *layers])
        file.create_group("input_1").attrs["weight_names"] = []
        for layer, entries in layers.items():
            group = file.create_group(layer)
            names = [f"{layer}/w{i}/{name}" for i, (name, _) in enumerate(entries)]
            legacy_h5_format.save_attributes_to_hdf5_group(group, "weight_names", names)
            for name, (_, weight) in zip(names, entries, strict=True):
                group[name] = values(name, weight.tensor.shape)
    return path


def thin(weights):
    """The same networks with one channel: order and axes are what tells them apart."""
    return [
        kerascv_h5.Weight(w.name, loader.Tensor((*[1] * (len(w.tensor.shape)),), np.dtype("f4"), None)) for w in weights
    ]


@pytest.fixture(scope="module")
def files(lists, tmp_path_factory):
    """Folder of thin files of both families under names that say nothing, and the file of each component."""
    folder = tmp_path_factory.mktemp("h5")
    made = {}
    for family, components in lists.items():
        for component, weights in components.items():
            if family == "sd1" or component in ("text_encoder", "unet"):
                random = np.random.default_rng(len(made))
                path = folder / f"{len(made)}.h5"
                made[family, component] = write(path, thin(weights), lambda _, shape, r=random: r.random(shape, "f4"))
    return folder, made


# === Order ===


@pytest.mark.parametrize("family", ["sd1", "sd2"])
def test_every_weight_of_kerascv_s_networks_has_a_place(lists, family):
    """Its own lists, complete: kinds agree, shapes fit, and the full-size model is filled. No weights are made."""
    config = kerascv_numerics(FAMILIES[family])
    with keras.StatelessScope(initialize_variables=False):
        layers = {
            "text_encoder": TextEncoder(config.text_encoder),
            "unet": UNet(config.unet),
            "vae": VAEDecoder(config.vae),
            "vae_encoder": VAEEncoder(config.vae),
        }
    for component, layer in layers.items():
        weights = lists[family][component]
        assert len(weights) == NUMBERS[component] or (family, component, len(weights)) == ("sd2", "text_encoder", 372)
        found, families = kerascv_h5.identify(weights)
        assert found == component and family in families
        assert (len(families) == 1) == (component in ("text_encoder", "unet"))
        named = kerascv_h5.named(weights, component, family, "here")
        variables = {v.path.replace("/", "."): types.SimpleNamespace(shape=tuple(v.shape)) for v in layer.variables}
        assignments, ignored, problems = loader.plan(variables, named, keymaps.KERASCV[component])
        assert not problems and not ignored and assignments.keys() == variables.keys()
    keras.utils.clear_session(free_memory=False)


def test_values_come_in_order(files):
    _, made = files
    for family, component in (("sd1", "vae_encoder"), ("sd2", "text_encoder")):
        path = made[family, component]
        with h5py.File(path, "r") as file:
            expected = [
                file[layer][name][()]
                for layer in file.attrs["layer_names"]
                for name in file[layer].attrs["weight_names"]
            ]
        named = kerascv_h5.named(kerascv_h5.read_h5(path), component, family, "here")
        assert list(named) == keymaps.kerascv_names(component, family)
        assert all((tensor.read() == value).all() for tensor, value in zip(named.values(), expected, strict=True))


def kerascv_text_encoder(layers):
    """KerasCV's text encoder from its own layers, narrow: what Keras' writer of files looks at, and how it is run."""
    from keras_cv.src.models.stable_diffusion.text_encoder import CLIPEmbedding, CLIPEncoderLayer

    parts = [CLIPEmbedding(50, 16, 77), *(CLIPEncoderLayer(16, 2, activation=ops.gelu) for _ in range(layers))]
    parts.append(keras.layers.LayerNormalization(epsilon=1e-5))

    def run(tokens):
        x = parts[0]([tokens, np.tile(np.arange(77, dtype="int32"), (len(tokens), 1))])
        for part in parts[1:]:
            x = part(x)
        return x

    run(np.zeros((1, 77), "int32"))
    weights = [variable for part in parts for variable in part.weights]
    model = types.SimpleNamespace(layers=parts, weights=weights, _trainable_variables=[], _non_trainable_variables=[])
    return model, run


@needs_kerascv
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras writing h5
def test_what_kerascv_s_layers_write_is_what_we_read(tmp_path):
    """The text encoder of Stable Diffusion 2.x: weights bit for bit, and the same numbers, tanh GELU included."""
    theirs, run = kerascv_text_encoder(23)
    random = np.random.default_rng(0)
    for variable in theirs.weights:
        variable.assign(random.standard_normal(variable.shape) * 0.3)
    path = tmp_path / "text.h5"
    with h5py.File(path, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, theirs)
    weights = kerascv_h5.read_h5(path)
    assert kerascv_h5.identify(weights) == ("text_encoder", ("sd2",))
    narrow = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2}
    ours = TextEncoder(dataclasses.replace(kerascv_numerics(FAMILIES["sd2"]).text_encoder, **narrow))
    tensors = kerascv_h5.named(weights, "text_encoder", "sd2", "here")
    assert loader.load([ours], tensors, keymaps.KERASCV["text_encoder"], "here") == []
    assert all((w.tensor.read() == v.numpy()).all() for w, v in zip(weights, theirs.weights, strict=True))
    tokens = random.integers(50, size=(2, 77)).astype("int32")
    np.testing.assert_allclose(ours(tokens)[0], run(tokens), rtol=0, atol=2e-5)


@needs_kerascv
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras writing h5
def test_the_encoder_is_kerascv_s(tmp_path, monkeypatch):
    """At its real size: its file fills ours, and the mean is what its network gives."""
    from keras_cv.src.models.stable_diffusion.image_encoder import ImageEncoder

    for name in ("VarianceScaling", "RandomUniform"):
        zeros = lambda self, shape, dtype=None, **_: ops.zeros(shape, dtype or "float32")  # noqa: E731
        monkeypatch.setattr(getattr(keras.initializers, name), "__call__", zeros)
    theirs = ImageEncoder(download_weights=False)
    for index, variable in enumerate(theirs.weights):
        kind = variable.path.rpartition("/")[2]
        variable.assign(kerascv.random_weight(0, "vae", index, kind, tuple(variable.shape)))
    path = tmp_path / "vae_encoder.h5"
    with h5py.File(path, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, theirs)
    config = kerascv_numerics(FAMILIES["sd1"]).vae
    ours = VAEEncoder(config)
    weights = kerascv_h5.read_h5(path)
    assert kerascv_h5.identify(weights) == ("vae_encoder", ("sd1", "sd2"))
    tensors = kerascv_h5.named(weights, "vae_encoder", "sd1", "here")
    assert loader.load([ours], tensors, keymaps.KERASCV["vae_encoder"], "here") == []
    image = np.random.default_rng(0).uniform(-1, 1, (1, 64, 64, 3)).astype("float32")
    mean, _ = ours(ops.convert_to_tensor(image))
    np.testing.assert_allclose(mean * config.scaling_factor, theirs(image), rtol=0, atol=1e-5)


def test_gelu_of_both_numerics():
    assert FAMILIES["sd2"].text_encoder.hidden_act == "gelu"
    assert kerascv_numerics(FAMILIES["sd2"]).text_encoder.hidden_act == "gelu_tanh"
    assert kerascv_numerics(FAMILIES["sd1"]).text_encoder.hidden_act == "quick_gelu"
    np.testing.assert_allclose(ACTIVATIONS["gelu_tanh"](np.float32([2.0, 2.7])), [1.9545977, 2.6911124], rtol=1e-6)
    # Its Stable Diffusion 2.x fills prompts up with the end token, and is the base model.
    config = kerascv_numerics(FAMILIES["sd2"])
    assert (config.text_encoder.pad_token, config.scheduler.prediction_type, config.default_size) == (
        None,
        "epsilon",
        512,
    )


# === Folders ===


def subset(files, tmp_path, *wanted):
    folder, made = files
    for number, key in enumerate(wanted):
        (tmp_path / f"{number}.h5").write_bytes(made[key].read_bytes())
    return tmp_path


SD1 = [("sd1", component) for component in SECTIONS]
SD2 = [("sd2", "text_encoder"), ("sd2", "unet"), ("sd1", "vae")]


@pytest.mark.parametrize(("wanted", "family"), [(SD1, "sd1"), (SD1[:3], "sd1"), (SD2, "sd2")])
def test_a_folder_of_one_model(files, tmp_path, wanted, family):
    folder = subset(files, tmp_path, *wanted)
    assert sources.is_kerascv(folder) and not sources.is_kerascv(tmp_path / "none")
    found = kerascv_h5.find(folder)
    assert found.family == family
    assert [path.name for path in found.paths.values()] == [f"{n}.h5" for n in range(len(wanted))]
    source = sources.h5_source(folder)
    assert source.name == f"kerascv-{family}" and source.encodes_images == (len(wanted) == 4)
    assert source.config == kerascv_numerics(FAMILIES[family])
    # Thin ones do not fill the real network.
    with pytest.raises(InputError, match=r"2\.h5: \d+ wrong shape: post_quant_conv.kernel is float32 \[1, 1, 1, 1\]"):
        source.fill("vae", [VAEDecoder(source.config.vae), VAEEncoder(source.config.vae)])


def test_a_cache_of_both_models(files):
    """KerasCV keeps all its files in one folder: a model is chosen by one of its own."""
    folder, made = files
    with pytest.raises(
        InputError, match=r"holds two models \(0\.h5, 1\.h5, 4\.h5, 5\.h5\); give one of these files as --c"
    ):
        kerascv_h5.find(folder)
    for family, component in (("sd1", "text_encoder"), ("sd2", "unet")):
        found = kerascv_h5.find(made[family, component])
        assert found.family == family and len(found.paths) == 4
        assert found.paths["unet"] == made[family, "unet"] and found.paths["vae"] == made["sd1", "vae"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            SD1[1:],
            "no .h5 file holds the text encoder of sd1; found 0.h5, 1.h5, 2.h5; not KerasCV's: other.h5, text.h5",
        ),
        (SD2[:2], "no .h5 file holds the decoder of sd2; found 0.h5, 1.h5"),
        ([*SD1, SD1[2]], "two files hold a decoder: 2.h5 and 4.h5; keep one"),
        ([], "no .h5 file holds the text encoder of sd1; found none"),
    ],
)
def test_folders_that_lack_or_repeat(files, tmp_path, wanted, message):
    folder = subset(files, tmp_path, *wanted)
    (folder / "text.h5").write_text("hello")
    with h5py.File(folder / "other.h5", "w") as file:
        file.create_group("dense").attrs["weight_names"] = []
        file.attrs["layer_names"] = ["dense"]
    with pytest.raises(InputError, match=re.escape(message)):
        kerascv_h5.find(folder)


# === What is damaged ===


def rename(attribute, change):
    def damage(file):
        names = list(file.attrs[attribute])
        file.attrs[attribute] = change(names)

    return damage


def swap_in_layer(file):
    group = file[file.attrs["layer_names"][2]]
    names = list(group.attrs["weight_names"])
    group.attrs["weight_names"] = [names[1], names[0], *names[2:]]


def external(file):
    layer = file.attrs["layer_names"][1]
    name = file[layer].attrs["weight_names"][0]
    del file[layer][name]
    file[layer][name] = h5py.ExternalLink("/etc/passwd", "x")


DAMAGED = {
    "two layers swapped": (
        rename("layer_names", lambda n: [*n[:2], n[-1], *n[2:-1]]),
        r"weights out of KerasCV's order: number 4, .*/w0/beta:0|weights out of KerasCV's order",
    ),
    "two weights swapped": (
        swap_in_layer,
        "2 weights out of KerasCV's order: number 2, .*beta:0, where encoder.layers.0.layer_norm1.gamma is expected",
    ),
    "a layer is not there": (
        rename("layer_names", lambda n: [*n, "gone"]),
        "names the layer 'gone', which it does not",
    ),
    "a weight is not there": (
        lambda file: file[file.attrs["layer_names"][1]].attrs.__setitem__("weight_names", ["gone"]),
        "names the weight '.*/gone', which it does not hold",
    ),
    "a weight elsewhere": (external, "names the weight '.*', which it does not hold"),
    "a weight too few": (
        rename("layer_names", lambda n: n[:-1]),
        "194 weights: none of KerasCV 0.9's Stable Diffusion networks",
    ),
    "no layer names": (lambda file: file.attrs.pop("layer_names"), "has no layer_names: .* not Keras 3's .weights.h5"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(files, tmp_path, case):
    damage, message = DAMAGED[case]
    path = subset(files, tmp_path, *SD1) / "0.h5"
    with h5py.File(path, "r+") as file:
        damage(file)
    with pytest.raises(InputError, match=message) as error:
        kerascv_h5.find(path)
    assert "0.h5" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_files(files, tmp_path, share):
    path = subset(files, tmp_path, *SD1) / "0.h5"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InputError, match=r"0\.h5: not a usable HDF5 file; it may be truncated") as error:
        kerascv_h5.find(path)
    assert "\n" not in str(error.value)


def test_a_file_that_changes_while_it_is_read(files, tmp_path):
    path = subset(files, tmp_path, *SD1) / "0.h5"
    tensor = kerascv_h5.read_h5(path)[0].tensor
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"0\.h5: ended or changed while '.*' was read"):
        tensor.read()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras writing h5
def test_keras_3_files_are_refused(tmp_path):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(InputError, match="has no layer_names: expected the HDF5 files that KerasCV publishes"):
        kerascv_h5.read_h5(tmp_path / "model.weights.h5")
