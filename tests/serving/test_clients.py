"""Clients that were not written for this toolkit: of the published KerasCV SavedModels, and of TensorFlow Serving.

TensorFlow Serving loads SavedModels with the session loader of TensorFlow 1, so that one must run every signature too.
"""

import contextlib
import os

import numpy as np
import pytest
import tensorflow as tf

from models.errors import InputError
from pipeline import manifest
from pipeline.sampling import samplers

PARTS = ("text_encoder", "diffusion_model", "decoder")


class Session:
    """One SavedModel in the session loader; its signatures as functions of named arrays."""

    def __init__(self, folder):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.session = tf.compat.v1.Session(graph=self.graph)
            tags = [tf.saved_model.SERVING]
            self.signatures = tf.compat.v1.saved_model.load(self.session, tags, str(folder)).signature_def

    def run(self, name, **inputs):
        signature = self.signatures[name]
        assert inputs.keys() == signature.inputs.keys()
        feeds = {signature.inputs[key].name: value for key, value in inputs.items()}
        return self.session.run({key: tensor.name for key, tensor in signature.outputs.items()}, feeds)


@pytest.fixture(scope="module")
def open_session():
    """Function (folder of a SavedModel) -> Session, each loaded once."""
    opened = {}

    def open_it(folder):
        if folder not in opened:
            with expected_warnings():
                opened[folder] = Session(folder)
        return opened[folder]

    yield open_it
    for session in opened.values():
        session.session.close()


@contextlib.contextmanager
def expected_warnings():
    """The session loader calls itself deprecated, by logging; that it works is the point."""
    previous = tf.compat.v1.logging.get_verbosity()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    yield
    tf.compat.v1.logging.set_verbosity(previous)


def example(spec, contract):
    """An input for one tensor of a signature: noise, tokens, or a run of two rows."""
    random = np.random.default_rng(0)
    shape = [2 if n is None else n for n in spec.shape]
    fixed = {
        "first_step": np.int32(0),
        "last_step": np.int32(2),
        "num_steps": np.int32(2),
        "unconditional_guidance_scale": np.float32(7.5),
        "guidance_scale": np.full(shape, 7.5, "float32"),
        "guidance_rescale": np.zeros(shape, "float32"),
        "seed": np.zeros(shape, "int32"),
        "timestep": np.full(shape, 500, "float32"),
        "memory": np.zeros(shape, "float32"),
    }
    if spec.name == "steps":
        return samplers.steps_table("ddim", contract.config.scheduler, 2, shape[0])[1]
    if spec.name in fixed:
        return fixed[spec.name]
    if "tokens" in spec.name:
        return random.integers(49408, size=shape).astype("int32")
    return np.ones(shape, "float32") if "weights" in spec.name else random.standard_normal(shape).astype("float32")


@pytest.mark.parametrize("part", PARTS)
def test_the_session_loader_runs_every_plain_signature(tiny_export, open_session, part):
    """The same numbers as ours; serving_default of the loop draws its own noise, so there only shape and sense."""
    contract = manifest.read(tiny_export)
    session, loaded = open_session(contract.path(part)), tf.saved_model.load(str(contract.path(part)))
    for name, signature in contract.signatures[part].items():
        inputs = {spec.name: example(spec, contract) for spec in signature.inputs}
        found = session.run(name, **inputs)
        expected = loaded.signatures[name](**{key: tf.constant(value) for key, value in inputs.items()})
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].shape == value.shape
            if part == "diffusion_model" and name == "serving_default":
                assert np.isfinite(found[key]).all() and not np.array_equal(found[key], value)
            elif value.dtype.is_floating:
                np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-5)
            elif value.dtype == tf.uint8:
                assert np.abs(found[key].astype(int) - value).max() <= 1
            elif value.dtype != tf.string:
                np.testing.assert_array_equal(found[key], value)
    identity = f"{manifest.ID_SIGNATURE}{contract.export_id}"
    assert session.run(identity)["export_id"].decode() == contract.export_id
    assert set(session.signatures) - set(contract.signatures[part]) <= {"__saved_model_init_op", identity}


# === Clients of the published SavedModels ===


class PublishedClient:
    """Generates as the benchmark that came with the published SavedModels does.

    It knows three callables `serving_default`, their names of tensors, and nothing else: token rows [B, 77],
    `tokens` -> `context`, `unconditional_context`; + `num_steps`, `unconditional_guidance_scale` -> `latent` ->
    `generated_images`.
    """

    def __init__(self, text_encoder, diffusion_model, decoder):
        self.text_encoder, self.diffusion_model, self.decoder = text_encoder, diffusion_model, decoder

    def generate(self, tokens, num_steps=3, scale=7.5):
        encoded = self.text_encoder(tokens=tf.constant(tokens))
        latent = self.diffusion_model(
            context=encoded["context"],
            unconditional_context=encoded["unconditional_context"],
            num_steps=tf.constant(num_steps),
            unconditional_guidance_scale=tf.constant(scale),
        )["latent"]
        return self.decoder(latent=latent)["generated_images"]


def session_client(folder, open_session):
    def function(part):
        session = open_session(folder / part / "1")
        return lambda **inputs: session.run("serving_default", **{k: np.array(v) for k, v in inputs.items()})

    return PublishedClient(*map(function, PARTS))


@pytest.fixture(scope="module", params=["python", "session"])
def client(request, tiny_export, open_session):
    if request.param == "session":
        yield session_client(tiny_export, open_session)
    else:
        loaded = [tf.saved_model.load(str(tiny_export / part / "1")) for part in PARTS]
        yield PublishedClient(*(model.signatures["serving_default"] for model in loaded))
        del loaded


def tokens(rows, seed=0):
    return np.random.default_rng(seed).integers(49408, size=(rows, 77)).astype("int32")


def test_published_clients_run_unchanged(client):
    """Warm-up with one token row per image, then one row for all; every call draws fresh noise."""
    warm = np.array(client.generate(tokens(4)))
    first, second = (np.array(client.generate(tokens(1))) for _ in range(2))
    for images in (warm, first, second):
        assert images.shape == (4, 18, 14, 3) and images.dtype == np.uint8 and images.std() > 5
    assert not np.array_equal(first, second) and len({image.tobytes() for image in first}) == 4


@pytest.mark.parametrize("num_steps", [1, 12])
def test_published_clients_choose_their_steps(client, num_steps):
    assert np.array(client.generate(tokens(2), num_steps=num_steps)).shape == (4, 18, 14, 3)


@pytest.mark.parametrize(("rows", "num_steps"), [(3, 3), (1, 0), (1, 13)])
def test_published_clients_are_told_what_does_not_fit(client, rows, num_steps):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="tokens must have 1, 2 or 4 rows|num_steps must be in 1..12"
    ):
        client.generate(tokens(rows), num_steps=num_steps)


def test_one_prompt_is_drawn_for_all_images(tiny_export, open_session):
    """Row B is 1, P or N: image r takes token row r * B // N, and the rest is the empty prompt."""
    session = open_session(tiny_export / "text_encoder" / "1")
    rows = tokens(4)
    whole = session.run("serving_default", tokens=rows)["context"]
    for count, order in ((1, [0, 0, 0, 0]), (2, [0, 0, 1, 1]), (4, [0, 1, 2, 3])):
        context = session.run("serving_default", tokens=rows[:count])["context"]
        np.testing.assert_allclose(context, whole[order], atol=1e-5)


@pytest.mark.parametrize("part", PARTS)
def test_published_clients_may_compile(tiny_export, part):
    """Wrapping a signature in a compiled function, as the published benchmark does, works for all three parts."""
    contract = manifest.read(tiny_export)
    loaded = tf.saved_model.load(str(contract.path(part)))
    compiled = tf.function(loaded.signatures["serving_default"], jit_compile=True)
    specs = contract.signatures[part]["serving_default"].inputs
    inputs = {spec.name: tf.constant(example(spec, contract)) for spec in specs}
    expected = loaded.signatures["serving_default"](**inputs)
    for name, value in compiled(**inputs).items():
        assert value.shape == expected[name].shape
        if part == "decoder":
            assert np.abs(np.array(value, int) - np.array(expected[name], int)).max() <= 1
        elif part == "text_encoder":
            np.testing.assert_allclose(value, expected[name], atol=1e-4)
        else:
            assert np.isfinite(value).all()


def test_a_part_alone_is_enough_for_a_server(tiny_export, tmp_path, monkeypatch):
    """A SavedModel needs nothing beside it: no manifest, no other part, no working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "decoder"
    os.makedirs(folder)
    os.symlink(tiny_export / "decoder" / "1", folder / "1")
    loaded = tf.saved_model.load(str(folder / "1"))
    assert loaded.signatures["serving_default"](latent=tf.zeros((4, 9, 7, 4)))["generated_images"].shape == (
        4,
        18,
        14,
        3,
    )
    with pytest.raises(InputError, match="not a finished export"):
        manifest.read(tmp_path / "models")
