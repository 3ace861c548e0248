"""Warm-up records: what TensorFlow Serving would replay when it loads an export."""

import numpy as np
import pytest
import tensorflow as tf

from models import endpoints, vae
from models.errors import InputError
from pipeline import export, manifest
from pipeline.savedmodel import signatures, warmup_records

PARTS = ("text_encoder", "diffusion_model", "decoder")


def logs(saved_model):
    """The records as TensorFlow Serving's own messages."""
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    found = tf.data.TFRecordDataset(str(saved_model / warmup_records.FILE)).as_numpy_iterator()
    return [prediction_log_pb2.PredictionLog.FromString(record) for record in found]


@pytest.mark.parametrize("part", PARTS)
def test_one_record_per_signature_and_each_runs(tiny_export, part):
    """Names, dtypes and shapes of the signature, read with the real messages; the answer has the promised shapes."""
    contract = manifest.read(tiny_export)
    loaded, seen = tf.saved_model.load(str(contract.path(part))), []
    for log in logs(contract.path(part)):
        assert log.WhichOneof("log_type") == "predict_log"
        spec = log.predict_log.request.model_spec
        signature = contract.signatures[part][spec.signature_name]
        inputs = {name: tf.make_ndarray(value) for name, value in log.predict_log.request.inputs.items()}
        assert {(name, value.dtype.name) for name, value in inputs.items()} == {
            (tensor.name, tensor.dtype) for tensor in signature.inputs
        }
        for tensor in signature.inputs:
            assert tf.TensorShape(tensor.shape).is_compatible_with(inputs[tensor.name].shape)
        outputs = loaded.signatures[spec.signature_name](**{k: tf.constant(v) for k, v in inputs.items()})
        for tensor in signature.outputs:
            assert tuple(outputs[tensor.name].shape) == tensor.shape
            assert tensor.dtype != "float32" or np.isfinite(outputs[tensor.name]).all()
        seen.append(spec.signature_name)
    assert sorted(seen) == sorted(contract.signatures[part]) and len(seen) <= 1000
    # The export's id is the name of a signature, which any server shows; it is in no list of the manifest.
    name = f"export_id_{contract.export_id}"
    assert name not in contract.signatures[part]
    assert loaded.signatures[name]()["export_id"].numpy().decode() == contract.export_id


def test_records_are_inside_the_checksums(tiny_export):
    contract = manifest.read(tiny_export)
    assert {f"{part}/1/assets.extra/tf_serving_warmup_requests" for part in PARTS} <= contract.files.keys()


def test_compiled_variants_have_records_only_where_asked(single_export, export_spec, tmp_path):
    """A server without XLA would not load the export otherwise."""
    contract = manifest.read(single_export)
    assert contract.xla_signatures
    for part in PARTS:
        names = [name for name, _ in warmup_records.read(contract.path(part))]
        assert names and not [name for name in names if name.endswith("_xla")]
    spec = export_spec(prompts=1, images_per_prompt=1)

    def build():
        model = vae.VAEDecoder(contract.config.vae, "float32")
        return export._variables(model), endpoints.decoder(model, contract.config, spec, signatures.share)

    folder = tmp_path / "decoder" / "1"
    export._save_part(build, folder, contract.config, True, True, "0123")
    records = dict(warmup_records.read(folder))
    np.testing.assert_array_equal(records["decode_xla"]["latent"], records["decode"]["latent"])


def test_compiled_variants_to_warm_up_must_be_asked_for(run_command):
    run = run_command("serialize_savedmodels.py", "--warmup_xla")
    assert run.returncode == 1 and "--warmup_xla warms up the compiled variants of --jit_compile" in run.stderr


def test_what_is_written_is_read(tmp_path):
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    assert warmup_records.read(folder) == []
    arrays = {"text": np.array([b"\x00\xfb\xff"], object), "none": np.zeros((0, 3), "float32"), "n": np.int32(7)}
    warmup_records.write(folder, {"first": arrays, "second": {}})
    [(first, inputs), (second, empty)] = warmup_records.read(folder)
    assert (first, second, empty) == ("first", "second", {})
    for name, value in arrays.items():
        assert inputs[name].shape == value.shape and inputs[name].dtype == value.dtype
        np.testing.assert_array_equal(inputs[name], value)
    assert logs(folder)[0].predict_log.request.model_spec.name == "model"


@pytest.mark.parametrize("damage", ["not records", "flipped"])
def test_damaged_records(tmp_path, damage):
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    warmup_records.write(folder, {"decode": {"latent": np.zeros((1, 2), "float32")}})
    path = folder / warmup_records.FILE
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(b"not records" * 9 if damage == "not records" else bytes(content))
    with pytest.raises(InputError, match="tf_serving_warmup_requests: not a file of warm-up records"):
        warmup_records.read(folder)
