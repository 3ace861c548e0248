"""Our networks and steps against KerasCV 0.9's own, at their real sizes, with the same random weights."""

import ctypes
import gc
import gzip
import importlib.util
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from keras import ops
from keras.src.legacy.saving import legacy_h5_format

from models import endpoints, loop
from models.errors import InputError
from models.export_spec import ExportSpec
from models.families import FAMILIES, kerascv_numerics
from models.text_encoder import TextEncoder
from models.unet import UNet, sinusoidal
from models.vae import VAEDecoder
from pipeline.checkpoints import kerascv, kerascv_h5, keymaps, loader
from pipeline.prompts import tokenizer
from pipeline.sampling import samplers

CONFIG = kerascv_numerics(FAMILIES["sd1"])
REFERENCE = FAMILIES["sd1"]
VOCABULARY = Path(__file__).parents[1].parent / "checkpoints" / "emoji" / "tokenizer"
# The issue asks for 1e-4; this is tight enough to tell the numerics profiles apart.
TOLERANCE = 1e-5

needs_kerascv = pytest.mark.skipif(
    importlib.util.find_spec("keras_cv") is None,
    reason="KerasCV is not installed: python -m pip install -r tests/requirements.txt",
)


@pytest.fixture
def quick_build(monkeypatch):
    """Networks start as zeros: drawing 900 million numbers to overwrite them takes longer than the tests."""

    def zeros(self, shape, dtype=None, **_):
        return ops.zeros(shape, dtype or "float32")

    for name in ("VarianceScaling", "RandomUniform", "RandomNormal"):
        monkeypatch.setattr(getattr(keras.initializers, name), "__call__", zeros)
    yield
    release()


def release():
    """Give freed weights back to the machine; the allocator would keep gigabytes of them."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def fill(layer, tensors, component):
    assert loader.load([layer], tensors, keymaps.KERASCV[component], "KerasCV") == []
    return layer


class Redrawn:
    """A variable of a freed network: its values can be drawn again."""

    def __init__(self, variable, *place):
        self.shape, self.dtype = tuple(variable.shape), variable.dtype
        self.place = (*place, variable.path.rpartition("/")[2], self.shape)

    def numpy(self):
        return kerascv.random_weight(*self.place)


def prompts(count):
    vocabulary = tokenizer.load(VOCABULARY)
    return vocabulary.encode_batch(["a red apple on a table", "two cats"][:count])[0]


def image_noise(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# Networks


@needs_kerascv
def test_text_encoder_is_kerascv_s(quick_build):
    theirs = kerascv.build("text_encoder", random_seed=0)
    tokens = prompts(2)
    positions = np.tile(np.arange(77, dtype=np.int32), (2, 1))
    expected = theirs.predict_on_batch({"tokens": tokens, "positions": positions})
    ours = fill(TextEncoder(CONFIG.text_encoder), loader.read_kerascv(theirs.weights, "text_encoder"), "text_encoder")
    np.testing.assert_allclose(ours(tokens)[0], expected, rtol=0, atol=TOLERANCE)
    assert np.abs(expected[0] - expected[1]).mean() > 0.1


@needs_kerascv
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras writing h5
def test_decoder_is_kerascv_s_and_reads_its_file(quick_build, monkeypatch, tmp_path):
    drawn = kerascv.build("vae", 0, 64, 64)
    with h5py.File(tmp_path / "kcv_decoder.h5", "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, drawn)
    fetched = []

    def get_file(origin, **_):
        fetched.append(origin.rpartition("/")[2])
        return str(tmp_path / fetched[-1])

    monkeypatch.setattr(keras.utils, "get_file", get_file)
    theirs = kerascv.build("vae", None, 64, 64)
    assert fetched == ["kcv_decoder.h5"]
    weights = kerascv_h5.read_h5(tmp_path / "kcv_decoder.h5")
    assert kerascv_h5.identify(weights) == ("vae", ("sd1", "sd2"))
    for before, after, read in zip(drawn.weights, theirs.weights, weights, strict=True):
        assert (before.numpy() == after.numpy()).all() and (read.tensor.read() == after.numpy()).all()
    latent = image_noise(1, 8, 8, 4)
    expected = theirs(latent)

    tensors = loader.read_kerascv(theirs.weights, "vae")
    ours = fill(VAEDecoder(CONFIG.vae), tensors, "vae")
    # KerasCV's decoder divides by the scaling factor itself.
    unscaled = latent / CONFIG.vae.scaling_factor
    np.testing.assert_allclose(ours(unscaled), expected, rtol=0, atol=TOLERANCE)
    reference = fill(VAEDecoder(REFERENCE.vae), tensors, "vae")
    assert np.abs(reference(unscaled) - expected).max() > TOLERANCE  # epsilon 1e-6


@needs_kerascv
def test_unet_is_kerascv_s(quick_build):
    context = ops.convert_to_tensor(image_noise(2, 77, 768))
    latent = ops.repeat(ops.convert_to_tensor(image_noise(1, 16, 16, 4)), 2, axis=0)
    timestep = ops.convert_to_tensor([981.0, 981.0])
    theirs = kerascv.build("unet", random_seed=0)
    inputs = {
        "timestep_embedding": sinusoidal(timestep, 320, freq_shift=0, cosine_first=True),
        "latent": latent,
        "context": context,
    }
    expected = np.asarray(theirs(inputs))
    tensors = loader.read_kerascv([Redrawn(v, 0, "unet", i) for i, v in enumerate(theirs.weights)], "unet")
    # Both at once would need 7 GB.
    del theirs
    release()
    ours = fill(UNet(CONFIG.unet), tensors, "unet")
    np.testing.assert_allclose(ours(latent, timestep, context), expected, rtol=0, atol=TOLERANCE)
    # Random weights must mean something: noise of a usable size that depends on the prompt.
    assert 0.5 < expected.std() < 2
    assert np.abs(expected[0] - expected[1]).mean() > 0.05


@needs_kerascv
def test_geglu_and_epsilon_are_kerascv_s():
    from keras_cv.src.models.stable_diffusion.attention_block import AttentionBlock
    from keras_cv.src.models.stable_diffusion.diffusion_model import GEGLU, SpatialTransformer
    from keras_cv.src.models.stable_diffusion.resnet_block import ResnetBlock

    geglu = GEGLU(1)
    geglu.dense.build((1, 1))
    geglu.dense.set_weights([np.array([[0.0, 1.0]], np.float32), np.array([1.0, 0.0], np.float32)])
    # Hidden value 1, gate 2.7: tanh GELU, which erf would make 2.6906392.
    np.testing.assert_allclose(geglu(np.array([[2.7]], np.float32)), [[2.6911124]], rtol=1e-6)
    assert CONFIG.unet.geglu_act == "gelu_tanh"

    norms = [SpatialTransformer(8, 40).norm, AttentionBlock(32).norm, ResnetBlock(32).norm1, ResnetBlock(32).norm2]
    epsilons = [CONFIG.unet.transformer_norm_eps, *[CONFIG.vae.norm_eps] * 3]
    assert [norm.epsilon for norm in norms] == epsilons == [1e-5] * 4
    assert {norm.groups for norm in norms} == {CONFIG.unet.norm_num_groups, CONFIG.vae.norm_num_groups}


@pytest.mark.parametrize("component", kerascv.COMPONENTS)
def test_every_weight_is_named_once(component):
    names = keymaps.KERASCV_NAMES[component]
    assert len(set(names)) == len(names)
    for name in names:
        assert keymaps.target(name, keymaps.KERASCV[component].rules)[0] == name
    with pytest.raises(InputError, match=rf"expected {len(names)} weights as in KerasCV 0.9, found 1$"):
        loader.read_kerascv([None], component)


# Its class: steps, guidance, tokens, pixels


class Stub:
    """A network of KerasCV's class that keeps what it is given."""

    def __init__(self, answer):
        self.answer, self.calls, self.jit_compile = answer, [], None

    def compile(self, jit_compile):
        self.jit_compile = jit_compile

    def predict_on_batch(self, inputs):
        self.calls.append(inputs)
        return np.asarray(self.answer(inputs), np.float32)


def predict(latent, angle, context):
    """A smooth stand-in for the UNet that depends on everything it is given."""
    return np.tanh(0.7 * latent + 0.2 * angle) + 0.3 * np.mean(context, axis=(1, 2))[:, None, None, None]


def stub_class(monkeypatch, decode=lambda latent: latent[..., :3], jit_compile=False):
    """KerasCV's class, made by our function, with stubs for networks."""
    stubs = {
        "text_encoder": Stub(lambda x: np.repeat(x["tokens"], 768, axis=0)[None].transpose(0, 2, 1) / 5e4),
        # The first of the embedding's cosines has frequency 1.
        "unet": Stub(lambda x: predict(x["latent"], x["timestep_embedding"][0, 0], x["context"])),
        "vae": Stub(decode),
    }
    monkeypatch.setattr(kerascv, "build", lambda component, *_, **__: stubs[component])
    model = kerascv.stable_diffusion(128, 256, tokenizer.load(VOCABULARY), random_seed=0, jit_compile=jit_compile)
    return model, stubs


@needs_kerascv
@pytest.mark.parametrize(("num_steps", "scale"), [(1, 7.5), (2, 1.0), (7, 0.5), (30, 7.5), (50, 7.5)])
def test_steps_and_guidance_are_kerascv_s(monkeypatch, num_steps, scale):
    model, stubs = stub_class(monkeypatch)
    noise = image_noise(1, 16, 32, 4)
    model.generate_image(
        model.encode_text("two cats"),
        num_steps=num_steps,
        unconditional_guidance_scale=scale,
        diffusion_noise=noise,
    )
    expected = stubs["vae"].calls[0]

    steps, table = samplers.steps_table("ddim", CONFIG.scheduler, num_steps, max_steps=50)
    # KerasCV's order of calls: unconditional, conditional; its embedding is ours at the table's timesteps.
    embeddings = np.concatenate([call["timestep_embedding"] for call in stubs["unet"].calls[::2]])
    own = sinusoidal(steps.rows[:, 0], 320, freq_shift=0, cosine_first=True)
    np.testing.assert_allclose(embeddings, own, rtol=0, atol=1e-4)

    contexts = [np.asarray(call["context"], np.float32) for call in stubs["unet"].calls[:2]]
    ours, _, _ = loop.denoise(
        lambda latent, timestep, context: ops.convert_to_tensor(
            predict(np.asarray(latent), np.cos(np.asarray(timestep)[0]), np.asarray(context)), "float32"
        ),
        noise,
        np.zeros((4, *noise.shape), np.float32),
        table,
        np.int32(0),
        np.int32(num_steps),
        # u + s (c - u) at every s, also where diffusers would leave guidance out.
        guidance=np.array([scale - 1], np.float32),
        guidance_rescale=np.zeros(1, np.float32),
        seed=np.zeros((1, 2), np.int32),
        conditioning={"context": (contexts[1], contexts[0])},
    )
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@needs_kerascv
def test_tokens_are_kerascv_s(monkeypatch, tmp_path):
    from keras_cv.models.stable_diffusion import SimpleTokenizer

    packed = tmp_path / "merges.txt.gz"
    packed.write_bytes(gzip.compress((VOCABULARY / "merges.txt").read_bytes()))
    own = SimpleTokenizer(str(packed))
    model, stubs = stub_class(monkeypatch)
    prompt = "A photo of   3 cats &amp; a dog's  hat!"
    model.encode_text(prompt)
    model._get_unconditional_context()
    sent, empty = (np.asarray(call["tokens"])[0] for call in stubs["text_encoder"].calls)
    ids = own.encode(prompt)
    assert sent.tolist() == ids + [49407] * (77 - len(ids))
    assert empty.tolist() == [49406] + [49407] * 76 == tokenizer.load(VOCABULARY).encode("").ids.tolist()
    with pytest.raises(InputError, match=r"at most 75 tokens, found more: 'cat' does not fit"):
        model.encode_text("cat " * 76)


@needs_kerascv
def test_pixels_are_truncated_as_kerascv_does(monkeypatch):
    values = np.array([-1, -0.5, 0, 0.5, 0.999, 1, 1.5, -1.5], np.float32)
    expected = [0, 63, 127, 191, 254, 255, 255, 0]
    image = np.broadcast_to(values[None, None, :, None], (1, 8, 8, 3))
    model, _ = stub_class(monkeypatch, decode=lambda latent: image)
    theirs = model.text_to_image("two cats", num_steps=1, seed=0)
    assert theirs.dtype == np.uint8 and theirs[0, 0, :, 0].tolist() == expected

    spec = ExportSpec(height=8, width=8, prompts=1, images_per_prompt=1, dtype="float32", max_steps=1)
    decode = {e.name: e for e in endpoints.decoder(lambda latent: ops.convert_to_tensor(image), CONFIG, spec)}["decode"]
    ours = decode.function(latent=np.zeros((1, 1, 1, 4), np.float32))["generated_images"]
    assert np.asarray(ours)[0, 0, :, 0].tolist() == expected


@needs_kerascv
@pytest.mark.parametrize("jit_compile", [True, False])
def test_class_is_compiled_as_asked_and_draws_batches(monkeypatch, jit_compile):
    model, stubs = stub_class(monkeypatch, jit_compile=jit_compile)
    assert [stub.jit_compile for stub in stubs.values()] == [jit_compile] * 3
    images = model.text_to_image("two cats", batch_size=3, num_steps=2, seed=7)
    assert images.shape == (3, 16, 32, 3)
    np.testing.assert_array_equal(images, model.text_to_image("two cats", batch_size=3, num_steps=2, seed=7))
    assert (images[0] != images[1]).any()


# What users can get wrong


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [
        (64, 128, "--height 64: KerasCV draws multiples of 128 pixels; nearest: 128 or 256"),
        (512, 320, "--width 320: KerasCV draws multiples of 128 pixels; nearest: 256 or 384"),
    ],
)
def test_sizes_are_refused_instead_of_rounded(height, width, message):
    with pytest.raises(InputError, match=message):
        kerascv.stable_diffusion(height, width, None, random_seed=0, jit_compile=False)


@needs_kerascv
def test_no_network_is_one_clear_line(quick_build, monkeypatch):
    def get_file(origin, **_):
        raise Exception("URL fetch failure on somewhere: None -- Name or service not known")

    monkeypatch.setattr(keras.utils, "get_file", get_file)
    with pytest.raises(InputError, match=r"^KerasCV's vae: expected .*service not known.*--random_weights$"):
        kerascv.build("vae", random_seed=None)


def test_missing_kerascv_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_cv", None)
    monkeypatch.setitem(sys.modules, "keras_cv.models", None)
    with pytest.raises(InputError, match=r"needs KerasCV.*pip install keras-cv==0\.9\.0$"):
        kerascv.build("unet", random_seed=0)


def test_random_weights_are_the_same_everywhere():
    kernel = kerascv.random_weight(0, "unet", 3, "kernel", (3, 3, 64, 32))
    assert kernel.dtype == np.float32
    np.testing.assert_allclose(kernel.std() * np.sqrt(3 * 3 * 64), 1, rtol=0.02)
    np.testing.assert_allclose(kernel.ravel()[:3], [-0.07125077, 0.02443779, -0.04059935], rtol=1e-5)
    assert (kernel == kerascv.random_weight(0, "unet", 3, "kernel", (3, 3, 64, 32))).all()
    for other in [(1, "unet", 3), (0, "vae", 3), (0, "unet", 4)]:
        assert (kernel != kerascv.random_weight(*other, "kernel", (3, 3, 64, 32))).mean() > 0.99
    assert abs(kerascv.random_weight(0, "unet", 0, "gamma", (10000,)).mean() - 1) < 0.01
