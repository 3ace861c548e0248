"""Reading weights: exact values from every form they come in, and one clear line for every damaged one."""

import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from models import layers
from models.errors import InputError
from pipeline.checkpoints import diffusers_folder, keymaps, loader

ROOT = Path(__file__).parents[2]


def raw(header, data=b"") -> bytes:
    """A .safetensors file from its parts, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def values(tensors):
    return {name: tensor.read() for name, tensor in tensors.items()}


# === One file ===


def test_bfloat16_words(tmp_path):
    """The words 0x3F80, 0x4049, 0xFF80 and 0x0001 are 1, 3.140625, -inf and the smallest number."""
    data = np.uint16([0x3F80, 0x4049, 0xFF80, 0x0001]).tobytes()
    (tmp_path / "w.safetensors").write_bytes(raw({"x": entry("BF16", [2, 2], 0, 8)}, data))
    read = loader.read_safetensors(tmp_path / "w.safetensors")["x"].read()
    assert read.shape == (2, 2)
    expected = np.float32([[1.0, 3.140625], [-np.inf, 2.0**-133]])
    np.testing.assert_array_equal(read.astype("float32"), expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "uint8", "bool"])
def test_every_type_as_the_reference_library_writes_it(tmp_path, dtype):
    arrays = {
        "b.matrix": (np.arange(12).reshape(3, 4) % 2).astype(dtype),
        "a.scalar": np.array(1, dtype),
        "c.empty": np.zeros((0, 3), dtype),
    }
    save_file(arrays, tmp_path / "w.safetensors", metadata={"format": "pt"})
    read = values(loader.read_safetensors(tmp_path / "w.safetensors"))
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype and read[name].shape == array.shape
        np.testing.assert_array_equal(read[name], array)


F32 = {"x": entry("F32", [2], 0, 8)}
DAMAGED = {
    "empty": (b"", "header of 0 bytes in a file of 0"),
    "cut in the length": (b"\x10\0\0", "header of 16 bytes in a file of 3"),
    "cut in the header": (raw(F32)[:30], "in a file of 30"),
    "cut in the data": (raw(F32, bytes(7)), "expected [0-9]+ bytes, found [0-9]+; it may be truncated"),
    "too long": (raw(F32, bytes(9)), "it may be truncated"),
    "huge header": (struct.pack("<Q", 2**63) + b"{}", "header of 9223372036854775808 bytes"),
    "not JSON": (raw(b"{'x': 1}"), "header is not JSON"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "header is not JSON"),
    "nested too deep": (raw(b"[" * 100_000), "header is not JSON"),
    "not an object": (raw([1, 2]), "header is not a JSON object"),
    "the same name twice": (
        raw(b'{"x": %b, "x": %b}' % ((json.dumps(F32["x"]).encode(),) * 2), bytes(8)),
        "duplicate keys: 'x'",
    ),
    "overlap": (raw({"x": entry("F32", [2], 0, 8), "y": entry("F32", [2], 4, 12)}, bytes(12)), "'y' starts at byte 4"),
    "hole": (raw({"x": entry("F32", [2], 0, 8), "y": entry("F32", [1], 12, 16)}, bytes(16)), "starts at byte 12, exp"),
    "before the data": (raw({"x": entry("F32", [2], -8, 0)}, bytes(8)), "'x' starts at byte -8"),
    "backwards": (raw({"x": entry("F32", [2], 8, 0)}, bytes(8)), "spans -8 bytes"),
    "wrong size": (raw({"x": entry("F32", [3], 0, 8)}, bytes(8)), r"'x' of shape \[3\] and type F32 spans 8 bytes"),
    "negative shape": (raw({"x": entry("F32", [-1, -2], 0, 8)}, bytes(8)), r"shape \[-1, -2\]"),
    "unknown type": (raw({"x": entry("Q4_K", [8], 0, 8)}, bytes(8)), "'x' has the entry .*Q4_K"),
    "type is no name": (raw({"x": entry(["F32"], [2], 0, 8)}, bytes(8)), r"'x' has the entry .*\['F32'\]"),
    "float8": (
        raw({"x": entry("F8_E4M3", [8], 0, 8)}, bytes(8)),
        "'x' is of type F8_E4M3, which is not supported; get",
    ),
    "offsets of 20 digits": (raw({"x": entry("F32", [2], 10**19, 10**19 + 8)}, bytes(8)), "starts at byte 10000000000"),
    "shape whose product overflows": (raw({"x": entry("F32", [2**62, 4, 2**62], 0, 8)}, bytes(8)), "spans 8 bytes"),
    "offsets are no numbers": (raw({"x": entry("F32", [2], True, 8)}, bytes(8)), "'x' has the entry"),
    "three offsets": (raw({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}, bytes(8)), "has the entry"),
    "no offsets": (raw({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)), "'x' has the entry"),
    "entry is a list": (raw({"x": [1]}), "'x' has the entry"),
    "infinite shape": (
        raw(b'{"x": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}', bytes(8)),
        "the entry",
    ),
    "fractional shape": (raw({"x": entry("F32", [2.5], 0, 8)}, bytes(8)), "'x' has the entry"),
    "shape is text": (raw({"x": entry("F32", "2", 0, 8)}, bytes(8)), "'x' has the entry"),
}


def many(count: int, one: bytes, separator: bytes = b", ") -> bytes:
    return separator.join([one] * count)


# Files made to be held in memory or printed at length.
HOSTILE = {
    "100,000 tensors": (
        lambda: raw({f"x{i}": entry("U8", [0], 0, 0) for i in range(100_000)}),
        "describes more than 20000 tensors",
    ),
    "100,000 numbers": (lambda: raw({f"x{i}": i for i in range(100_000)}), "describes more than 20000 tensors"),
    "a name of 15 MB": (lambda: raw({"x" * (15 << 20): 1}), r"tensor 'x{99}\.\.\. has the entry 1$"),
    "a shape of 5,000,000 axes": (
        lambda: raw(b'{"x": {"dtype": "F32", "shape": [%b], "data_offsets": [0, 4]}}' % many(5_000_000, b"1")),
        "'x' has the entry .*shape",
    ),
    "a number of 4,000 digits": (
        lambda: raw(b'{"x": {"dtype": "F32", "shape": [%b], "data_offsets": [0, 4]}}' % (b"9" * 4000)),
        r"of shape \[9{99}\.\.\. and type F32 spans 4 bytes",
    ),
    "a number of a million digits": (lambda: raw(b'{"x": %b}' % (b"9" * 1_000_000)), "header is not JSON"),
    "deep in one entry": (
        lambda: raw(b'{"x": {"dtype": "F32", "shape": [%b%b], "data_offsets": [0, 4]}}' % (b"[" * 900, b"]" * 900)),
        "'x' has the entry",
    ),
    "16 MB of nothing": (lambda: struct.pack("<Q", 17 << 20) + bytes(18 << 20), "header of 17825792 bytes"),
}


READ_ALL = """
import resource, sys
from pathlib import Path
from models import errors
from pipeline.checkpoints import loader
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        loader.read_safetensors(Path(path))
        print()
    except errors.InputError as error:
        print(error)
"""


def test_hostile_files_need_little_memory_and_one_line(tmp_path):
    """A header may be 16 MB, and be there as bytes, as text and as numbers of 8 bytes each: 160 MB are enough."""
    paths = [tmp_path / f"{i}.safetensors" for i in range(len(HOSTILE))]
    for path, (make, _) in zip(paths, HOSTILE.values(), strict=True):
        path.write_bytes(make())
    command = [sys.executable, "-c", READ_ALL, *map(str, paths)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0 and len(run.stdout.splitlines()) == len(HOSTILE), run.stderr
    for path, line, (case, (_, message)) in zip(paths, run.stdout.splitlines(), HOSTILE.items(), strict=True):
        assert re.search(message, line) and len(line) < len(str(path)) + 300, case


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(tmp_path, case):
    content, message = DAMAGED[case]
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        loader.read_safetensors(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_every_cut_of_a_file_is_noticed(tmp_path):
    whole = raw({"x": entry("F32", [2], 0, 8), "y": entry("F16", [1], 8, 10)}, bytes(10))
    path = tmp_path / "w.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            loader.read_safetensors(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(raw(F32, bytes(8)))
    tensor = loader.read_safetensors(path)["x"]
    path.write_bytes(raw(F32, bytes(4)))
    with pytest.raises(InputError, match="ended while a tensor was read"):
        tensor.read()


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"none\.safetensors: cannot be read \(No such file"):
        loader.read_safetensors(tmp_path / "none.safetensors")


# === Folders ===


def unet_folder(tmp_path, files):
    (tmp_path / "unet").mkdir()
    for name, content in files.items():
        path = tmp_path / "unet" / name
        if isinstance(content, dict) and name.endswith(".json"):
            path.write_text(json.dumps(content))
        elif isinstance(content, dict):
            save_file(content, path)
        else:
            path.write_bytes(content)
    return tmp_path


ONE, TWO = {"a": np.float32([1])}, {"b": np.float32([2])}
STEM = "diffusion_pytorch_model"
SHARDS = {f"{STEM}-1-of-2.safetensors": ONE, f"{STEM}-2-of-2.safetensors": TWO}
INDEX = {"weight_map": {"a": f"{STEM}-1-of-2.safetensors", "b": f"{STEM}-2-of-2.safetensors"}}
HALF_SHARDS = {f"{STEM}.fp16-1-of-2.safetensors": ONE, f"{STEM}.fp16-2-of-2.safetensors": TWO}
HALF_INDEX = {"weight_map": {"a": f"{STEM}.fp16-1-of-2.safetensors", "b": f"{STEM}.fp16-2-of-2.safetensors"}}


@pytest.mark.parametrize(
    "files",
    [
        {f"{STEM}.safetensors": ONE | TWO},
        {f"{STEM}.fp16.safetensors": ONE | TWO},
        SHARDS | {f"{STEM}.safetensors.index.json": INDEX},
        HALF_SHARDS | {f"{STEM}.safetensors.index.fp16.json": HALF_INDEX},
        HALF_SHARDS | {f"{STEM}.fp16.safetensors.index.json": HALF_INDEX},
    ],
    ids=["file", "fp16", "shards", "fp16 shards", "fp16 shards, other spelling"],
)
def test_files_of_a_component(tmp_path, files):
    read = values(diffusers_folder.read_weights(unet_folder(tmp_path, files), "unet"))
    assert {name: array.tolist() for name, array in read.items()} == {"a": [1], "b": [2]}


def test_plain_files_first_unless_a_variant_is_asked_for(tmp_path):
    files = {f"{STEM}.safetensors": {"a": np.float32([1])}, f"{STEM}.fp16.safetensors": {"a": np.float16([3])}}
    folder = unet_folder(tmp_path, files)
    assert diffusers_folder.read_weights(folder, "unet")["a"].read() == 1
    assert diffusers_folder.read_weights(folder, "unet", "fp16")["a"].read() == 3
    # Where the variant is missing, the plain file serves: folders hold it for some components only.
    assert diffusers_folder.read_weights(folder, "unet", "non_ema")["a"].read() == 1


BAD_SHARDS = {
    "shard missing": ({list(SHARDS)[0]: ONE}, INDEX, r"2-of-2\.safetensors: cannot be read"),
    "tensor missing": (SHARDS, {"weight_map": INDEX["weight_map"] | {"c": list(SHARDS)[0]}}, "do not hold: c"),
    "tensor not listed": (SHARDS, {"weight_map": {"b": list(SHARDS)[1], "c": list(SHARDS)[0]}}, "says 'a' is in None"),
    "tensor in two": (SHARDS | {list(SHARDS)[1]: ONE | TWO}, INDEX, "says 'a' is in .*1-of-2.*, found it in .*2-of-2"),
    "leaves the folder": ({}, {"weight_map": {"a": "../vae/x.safetensors"}}, "is not a plain file name"),
    "no map": ({}, {"weight_map": ["a"]}, "expected a weight_map"),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_shards_that_do_not_fit(tmp_path, case):
    files, index, message = BAD_SHARDS[case]
    folder = unet_folder(tmp_path, files | {f"{STEM}.safetensors.index.json": index})
    with pytest.raises(InputError, match=message):
        diffusers_folder.read_weights(folder, "unet")


class Canary:
    def __reduce__(self):
        return os.mkdir, (os.environ["CANARY"],)


@pytest.mark.parametrize("name", [f"{STEM}.bin", f"{STEM}.ckpt", f"{STEM}.pt", f"{STEM}.safetensors"])
def test_pickles_are_refused_and_never_executed(tmp_path, monkeypatch, name):
    """Under any name, the right one included: what it would run is not run."""
    monkeypatch.setenv("CANARY", str(tmp_path / "executed"))
    folder = unet_folder(tmp_path, {name: pickle.dumps(Canary())})
    with pytest.raises(InputError, match="pickle files can run code" if "safe" not in name else "not a usable"):
        diffusers_folder.read_weights(folder, "unet")
    assert not (tmp_path / "executed").exists()
    with pytest.raises(InputError, match="is a file; expected a folder in diffusers' layout"):
        diffusers_folder.check_folder(folder / "unet" / name)
    pickle.loads(pickle.dumps(Canary()))
    assert (tmp_path / "executed").exists()  # the canary can sing


def test_folders_without_weights(tmp_path):
    folder = unet_folder(tmp_path, {"config.json": {}})
    with pytest.raises(InputError, match=r"expected diffusion_pytorch_model\.safetensors.*found config\.json"):
        diffusers_folder.read_weights(folder, "unet")
    with pytest.raises(InputError, match="found nothing"):
        diffusers_folder.read_weights(folder, "vae")


def test_folders_that_are_no_checkpoint(damaged_checkpoint):
    with pytest.raises(InputError, match="no such folder"):
        diffusers_folder.check_folder(damaged_checkpoint / "none")
    (damaged_checkpoint / "safety_checker").mkdir()
    (damaged_checkpoint / "feature_extractor").mkdir()
    assert diffusers_folder.check_folder(damaged_checkpoint) == ["feature_extractor/", "safety_checker/"]
    index = json.loads((damaged_checkpoint / "model_index.json").read_text())
    changed = index | {"text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}
    (damaged_checkpoint / "model_index.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match="components not supported: text_encoder_2"):
        diffusers_folder.check_folder(damaged_checkpoint)
    (damaged_checkpoint / "model_index.json").write_text(json.dumps(index))
    (damaged_checkpoint / "vae").rename(damaged_checkpoint / "vae_1_0")
    with pytest.raises(InputError, match=r"missing \['vae'\]"):
        diffusers_folder.check_folder(damaged_checkpoint)


# === Loading ===


def source(arrays):
    return {name: loader.Tensor(array.shape, array.dtype, lambda array=array: array) for name, array in arrays.items()}


def toy():
    """A norm, a linear layer and a convolution under names of a VAE, and tensors that fill them."""
    made = [
        layers.LayerNorm("decoder.norm1", 3, 1e-5, "float32"),
        layers.Dense("decoder.mid_block.attentions.0.to_q", 2, 3, "float32"),
        layers.Conv2D("decoder.conv_in", 2, 5, "float32", kernel_size=3),
    ]
    random = np.random.default_rng(0)
    arrays = {
        "decoder.norm1.weight": random.standard_normal(3),
        "decoder.norm1.bias": random.standard_normal(3),
        "decoder.mid_block.attentions.0.to_q.weight": random.standard_normal((3, 2)),
        "decoder.mid_block.attentions.0.to_q.bias": random.standard_normal(3),
        "decoder.conv_in.weight": random.standard_normal((5, 2, 3, 3)),
        "decoder.conv_in.bias": random.standard_normal(5),
    }
    return made, {name: array.astype("float32") for name, array in arrays.items()}


def test_layouts():
    """Linear layers are transposed, convolutions go from OIHW to HWIO."""
    made, arrays = toy()
    assert loader.load(made, source(arrays), keymaps.DIFFUSERS["vae"], "here") == []
    norm, dense, conv = made
    np.testing.assert_array_equal(norm.gamma, arrays["decoder.norm1.weight"])
    np.testing.assert_array_equal(norm.beta, arrays["decoder.norm1.bias"])
    np.testing.assert_array_equal(dense.kernel, arrays["decoder.mid_block.attentions.0.to_q.weight"].T)
    np.testing.assert_array_equal(conv.kernel, np.einsum("oihw->hwio", arrays["decoder.conv_in.weight"]))


def test_one_error_lists_everything():
    made, arrays = toy()
    arrays["decoder.unknown.weight"] = np.zeros(1, "float32")
    del arrays["decoder.conv_in.bias"]
    arrays["decoder.norm1.bias"] = np.zeros(4, "float32")
    arrays["decoder.mid_block.attentions.0.query.weight"] = arrays["decoder.mid_block.attentions.0.to_q.weight"]
    with pytest.raises(InputError) as error:
        loader.load(made, source(arrays), keymaps.DIFFUSERS["vae"], "here")
    assert str(error.value) == (
        "here: 1 unused: decoder.unknown.weight; 1 missing: decoder.conv_in.bias; "
        "1 assigned twice: decoder.mid_block.attentions.0.query.weight and decoder.mid_block.attentions.0.to_q.weight; "
        "1 wrong shape: decoder.norm1.bias is float32 [4], expected to fill [3]"
    )


def test_nothing_is_assigned_when_anything_is_wrong():
    made, arrays = toy()
    before = made[0].gamma.numpy()
    with pytest.raises(InputError):
        loader.load(made, source(arrays | {"more": np.zeros(1)}), keymaps.DIFFUSERS["vae"], "here")
    np.testing.assert_array_equal(made[0].gamma, before)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(value):
    made, arrays = toy()
    arrays["decoder.conv_in.weight"][4, 1, 2, 2] = value
    with pytest.raises(InputError, match="here: tensor decoder.conv_in.weight holds NaN or infinite values"):
        loader.load(made, source(arrays), keymaps.DIFFUSERS["vae"], "here")


def test_weights_that_overflow_the_type_they_are_stored_in():
    made, arrays = toy()
    arrays["decoder.conv_in.bias"] = np.float64([0, 0, 0, 0, 1e300])
    with pytest.raises(InputError, match="here: tensor decoder.conv_in.bias"):
        loader.load(made, source(arrays), keymaps.DIFFUSERS["vae"], "here")


def test_weights_of_8_bytes_are_rounded_once():
    made, arrays = toy()
    exact = np.float64([1 + 2.0**-30, 1 + 2.0**-23, 1e-30, -1 / 3, 0.1])
    assert loader.load(made, source(arrays | {"decoder.conv_in.bias": exact}), keymaps.DIFFUSERS["vae"], "x") == []
    np.testing.assert_array_equal(made[2].bias, exact.astype("float32"))


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "bool"])
def test_integers_are_no_weights(dtype):
    made, arrays = toy()
    arrays["decoder.conv_in.bias"] = np.zeros(5, dtype)
    with pytest.raises(InputError, match=f"1 no floating-point numbers: decoder.conv_in.bias is {dtype}$"):
        loader.load(made, source(arrays), keymaps.DIFFUSERS["vae"], "here")
