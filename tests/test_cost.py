"""pipeline.cost: counts by hand, PyTorch's counts of the same models, and the same counts from either source."""

import dataclasses
import json
from pathlib import Path

import pytest
import tensorflow as tf

from models import diffusers, layers
from models.config import ExportSpec, InputError
from pipeline import cost, manifest

GOLDENS = Path(__file__).parent / "goldens"
NONE = {kind: {} for kind in cost.KINDS}


def spec(*shape, dtype="float32"):
    return tf.TensorSpec(shape, dtype)


def count(function, *specs, name="encode"):
    return cost.of_function(name, tf.function(function, autograph=False).get_concrete_function(*specs))


# === By hand ===


def test_convolution():
    kernel = tf.Variable(tf.zeros((3, 3, 3, 5)))
    found = count(lambda x: tf.nn.conv2d(x, kernel, strides=2, padding="SAME"), spec(2, 8, 6, 3))["encode"]
    inputs, outputs = 4 * 2 * 8 * 6 * 3, 4 * 2 * 4 * 3 * 5
    flops = NONE | {"convolution": {"float32": 2 * (2 * 4 * 3 * 5) * (3 * 3 * 3)}}
    both = inputs + outputs
    assert found == cost.Cost(flops, weights=4 * 3 * 3 * 3 * 5, moved=both, fused=both, peak=both)


def test_matmul_with_a_cast_weight():
    """The copy is made and moved, but the weight is read as stored, and a compiler needs no copy."""
    kernel = tf.Variable(tf.zeros((6, 5)))
    found = count(lambda x: tf.matmul(x, tf.cast(kernel, "bfloat16")), spec(4, 6, dtype="bfloat16"))["encode"]
    x, copy, y = 2 * 4 * 6, 2 * 6 * 5, 2 * 4 * 5
    flops = NONE | {"matmul": {"bfloat16": 2 * 4 * 5 * 6}, "rest": {"bfloat16": 30}}
    assert found == cost.Cost(flops, weights=4 * 30, moved=copy + x + copy + y, fused=x + y, peak=x + copy + y)


def test_batched_and_transposed_weights_are_matmuls():
    kernel = tf.Variable(tf.zeros((3, 5, 4)))
    found = count(lambda x: tf.matmul(x, kernel, transpose_a=True), spec(3, 5, 7))["encode"]
    assert found.flops == NONE | {"matmul": {"float32": 2 * (3 * 7 * 4) * 5}}


def test_attention():
    def attend(q, k, v):
        return tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v)

    found = count(attend, spec(3, 7, 4), spec(3, 5, 4), spec(3, 5, 6))["encode"]
    q, k, v, logits, y = (4 * 3 * n for n in (7 * 4, 5 * 4, 5 * 6, 7 * 5, 7 * 6))
    assert found.flops == NONE | {
        "attention": {"float32": 2 * 3 * 7 * 5 * 4 + 2 * 3 * 7 * 6 * 5},
        "rest": {"float32": 3 * 7 * 5},
    }
    assert (found.weights, found.fused, found.moved) == (0, q + k + v + y, q + k + v + y + 4 * logits)
    # The softmax takes its logits' place.
    assert found.peak == q + k + v + logits + y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_of_the_networks(dtype):
    """Layout, scale, mask and casts in between do not hide which products belong to a softmax."""
    mask = [[True] * 5] * 7
    found = count(
        lambda q, k, v: layers.attention(q, k, v, num_heads=2, mask=tf.constant(mask)),
        *(spec(3, n, 8, dtype=dtype) for n in (7, 5, 5)),
    )["encode"]
    assert found.flops["attention"] == {dtype: 2 * (2 * 3 * 7 * 5 * 8)}
    assert found.fused == (2 if dtype == "bfloat16" else 4) * 3 * 8 * (7 + 5 + 5 + 7)
    assert not found.flops["matmul"] and found.moved > 2 * found.fused


def test_rows_taken_from_a_table():
    table = tf.Variable(tf.zeros((1000, 6)))
    found = count(lambda ids: tf.gather(tf.convert_to_tensor(table), ids), spec(2, 3, dtype="int32"))["encode"]
    assert found.weights == 4 * 2 * 3 * 6 and found.total() == 0
    assert found.peak == 4 * 6 + 4 * 36


def test_peak_memory():
    """y lives until the last sum, which takes its place; dead and unneeded tensors take none."""

    def function(x):
        y = x + 1.0
        tf.matmul(x, x)
        z = tf.reshape(tf.matmul(tf.transpose(y), y), (16,))
        return tf.reshape(y, (16,)) + z

    found = count(function, spec(4, 4))["encode"]
    assert found.peak == 64 * 4  # x, y, y transposed, z
    assert found.flops["rest"] == {"float32": 32} and found.flops["attention"] == {"float32": 2 * 4 * 4 * 4}


def test_functions_are_counted_where_they_are_called():
    kernel = tf.Variable(tf.zeros((4, 4)))
    inner = tf.function(lambda x: tf.matmul(tf.matmul(x, kernel), kernel), autograph=False)
    flat = count(lambda x: tf.matmul(tf.matmul(x, kernel), kernel), spec(2, 4))["encode"]
    assert count(lambda x: inner(x), spec(2, 4))["encode"] == flat
    twice = count(lambda x: inner(inner(x)), spec(2, 4))["encode"]
    assert twice.total() == 2 * flat.total() and twice.weights == 2 * flat.weights


def repeat(times, function, x):
    return tf.while_loop(
        lambda i, x: i < tf.cast(times, "int32"), lambda i, x: (i + 1, function(x)), (tf.zeros((), "int32"), x)
    )[1]


def test_loops_are_counted_per_row():
    kernel, inside = tf.Variable(tf.zeros((4, 4))), tf.Variable(tf.zeros((4, 4)))
    product = 2 * 3 * 4 * 4

    def denoise(x, steps):
        return repeat(steps, lambda x: tf.matmul(tf.matmul(x, inside), inside), tf.matmul(x, kernel))

    found = count(denoise, spec(3, 4), spec(dtype="int32"), name="denoise")
    assert list(found) == ["denoise once", "denoise per row"]
    assert [each.total("matmul") for each in found.values()] == [product, 2 * product]
    assert [each.weights for each in found.values()] == [64, 128]
    with pytest.raises(InputError, match="encode: has a loop, and how often it runs is not in the graph"):
        count(denoise, spec(3, 4), spec(dtype="int32"))
    with pytest.raises(InputError, match="is a loop around another, and how often that one runs is not in the graph"):
        nested = lambda x: repeat(2, lambda x: repeat(2, lambda x: x + 1.0, x), x)  # noqa: E731
        count(nested, spec(3, 4), name="denoise")


def test_loops_with_a_limit_are_counted_as_often():
    """Attention in chunks, in the denoising loop or out of it."""
    chunks = spec(6, 3, 5)

    def chunked(x):
        return tf.map_fn(lambda rows: tf.matmul(rows, rows, transpose_a=True), x)

    found = count(chunked, chunks)["encode"]
    assert found.flops["attention"] == {"float32": 6 * 2 * 5 * 5 * 3}
    assert found.fused == 4 * 6 * (3 * 5 + 5 * 5)
    row = count(lambda x: repeat(x[0, 0, 0] > 0, lambda x: x + tf.reduce_sum(chunked(x)), x), chunks, name="denoise")
    assert row["denoise per row"].total("attention") == found.total("attention")


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (lambda x: tf.einsum("ij,jk->ik", x, x), (4, 4), "no rule to count the FLOPs of Einsum"),
        (lambda x: x + 1.0, (None, 4), "has no fixed shape"),
    ],
)
def test_what_cannot_be_counted(function, shape, message):
    with pytest.raises(InputError, match=message):
        count(function, spec(*shape))


# === The networks ===


@pytest.fixture(scope="module")
def flops():
    """CASE/FUNCTION -> what PyTorch counts."""
    return json.loads((GOLDENS / "flops.json").read_text())


@pytest.fixture(scope="module")
def tiny(tiny_sd1_export):
    """The tiny export's manifest and costs."""
    contract = manifest.read(tiny_sd1_export)
    return contract, cost.of_export(contract, contract.spec.size)


def test_a_configuration_costs_what_its_export_does(tiny):
    contract, found = tiny
    assert set(found) == {"encode", "unet", "denoise once", "denoise per row", "decode", "encode_image"}
    functions = ("encode", "denoise", "decode")
    traced = cost.of_config(contract.config, contract.spec, functions)
    assert list(traced) == ["encode", "denoise once", "denoise per row", "decode"]
    assert traced == {name: found[name] for name in traced}


def as_golden(found):
    return {"convolution and matmul": found.total("convolution", "matmul"), "attention": found.total("attention")}


def test_flops_are_those_that_pytorch_counts(tiny, flops):
    _, found = tiny
    for name in ("encode", "unet", "decode", "encode_image"):
        assert as_golden(found[name]) == flops[f"tiny_sd1 48x32 2/{name}"]


def test_flops_of_sdxl_are_those_that_pytorch_counts(flops):
    export_spec = ExportSpec(32, 48, prompts=1, images_per_prompt=2, dtype="bfloat16", max_steps=4)
    found = cost.of_config(diffusers.read_config(GOLDENS / "families" / "sdxl"), export_spec, ["unet"])["unet"]
    assert as_golden(found) == flops["families/sdxl 48x32 2/unet"]
    assert set(found.flops["convolution"]) == set(found.flops["attention"]) == {"bfloat16"}


def test_a_guided_step_is_the_unet_at_twice_the_rows(tiny):
    _, found = tiny
    unet, once, row = found["unet"], found["denoise once"], found["denoise per row"]
    for kind in ("convolution", "attention"):
        assert row.total(kind) == 2 * unet.total(kind) and once.total(kind) == 0
    # What is the same at each step may be computed before the loop.
    assert row.total("matmul") + once.total("matmul") == 2 * unet.total("matmul")
    # The weights do not grow with the rows.
    assert unet.weights == pytest.approx(row.weights + once.weights, rel=0.01)


def test_missing_graphs(tiny, tmp_path):
    contract, _ = tiny
    elsewhere = dataclasses.replace(contract, folder=tmp_path)
    with pytest.raises(InputError, match=r"saved_model.pb: cannot be read \(No such file"):
        cost.of_export(elsewhere, contract.spec.size)
    path = elsewhere.path("text_encoder") / "saved_model.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no protocol buffer")
    with pytest.raises(InputError, match="saved_model.pb: not a SavedModel"):
        cost.of_export(elsewhere, contract.spec.size)
