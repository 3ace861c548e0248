"""A toy model with signatures of every kind, and servers that run it."""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

ROOT = Path(__file__).parents[2]
REAL = shutil.which("tensorflow_model_server")
ADDED = {1: 2.0, 2: 3.0}  # version of the toy model -> what it adds to half of x


# === Models ===


def save_toy(folder: Path, added: float) -> None:
    """Signatures of every kind of tensor that a client can meet."""

    def signature(function, **inputs):
        specs = {name: tf.TensorSpec(shape, dtype, name) for name, (dtype, shape) in inputs.items()}
        return tf.function(function).get_concrete_function(**specs)

    module = tf.Module()
    module.added = tf.Variable(added)
    row = [None]
    compiled = tf.function(lambda x: x / 2 + module.added, jit_compile=True)
    kinds = {"i": tf.int32, "l": tf.int64, "u": tf.uint8, "d": tf.float64, "flag": tf.bool}
    signatures = {
        "serving_default": signature(lambda x: {"y": x / 2 + module.added}, x=(tf.float32, row)),
        "two": signature(lambda a, b: {"a": a, "b": b + 1}, a=(tf.float32, row), b=(tf.int32, row)),
        "defaulted": signature(lambda a, b: {"a": a, "b": b + 1}, a=(tf.float32, row), b=(tf.int32, row)),
        "scalar": signature(lambda n, x: {"n": n + 1, "x": x}, n=(tf.int32, []), x=(tf.float32, row)),
        "matrix": signature(lambda x: {"x": x}, x=(tf.float32, [None, None])),
        "fixed": signature(lambda x: {"x": tf.ensure_shape(x, [2])}, x=(tf.float32, [2])),
        "kinds": signature(
            lambda **x: {f"{k}_out": v for k, v in x.items()}, **{k: (v, row) for k, v in kinds.items()}
        ),
        "bytes": signature(lambda s: {"s_bytes": s}, s=(tf.string, row)),
        "text": signature(lambda s: {"s": s}, s=(tf.string, row)),
        "special": signature(lambda x: {"y": x / [0.0, 0.0, 0.0]}, x=(tf.float32, [3])),
        "half_in": signature(lambda h: {"y": tf.cast(h, tf.float32)}, h=(tf.float16, row)),
        "half_out": signature(lambda x: {"h": tf.cast(x, tf.float16)}, x=(tf.float32, row)),
        "scalar_out": signature(lambda x: {"sum": tf.reduce_sum(x)}, x=(tf.float32, row)),
        "uneven": signature(lambda x: {"x": x, "z": tf.concat([x, x], 0)}, x=(tf.float32, row)),
        "compiled": signature(lambda x: {"y": compiled(x)}, x=(tf.float32, row)),
        "classify": signature(classify, inputs=(tf.string, row)),
        "regress": signature(lambda inputs: {"outputs": parse(inputs) / 2 + module.added}, inputs=(tf.string, row)),
    }
    tf.saved_model.save(module, str(folder), signatures)
    # Defaults of inputs are not part of what tf.saved_model.save takes.
    path = folder / "saved_model.pb"
    message = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    message.meta_graphs[0].signature_def["defaulted"].defaults["b"].CopyFrom(tf.make_tensor_proto([5], tf.int32))
    path.write_bytes(message.SerializeToString())


def parse(inputs):
    return tf.io.parse_example(inputs, {"x": tf.io.FixedLenFeature([1], tf.float32)})["x"]


def classify(inputs):
    scores = tf.concat([parse(inputs), -parse(inputs)], axis=1)
    return {"scores": scores, "classes": tf.where(scores > 0, b"plus", b"minus")}


# === Server ===


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launcher(folder: Path) -> Path:
    """A program that can take the place of the binary."""
    path = folder / "tensorflow_model_server"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m pipeline.serving serve "$@"\n')
    path.chmod(0o755)
    return path


class Server:
    """A running server, ours or the real one."""

    def __init__(self, program: str | Path, folder: Path, *arguments: str):
        self.port, self.rest_port = free_port(), free_port()
        command = [str(program), f"--port={self.port}", f"--rest_api_port={self.rest_port}", *arguments]
        self.log = (folder / "server.log").open("w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.predictions = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)
        for _ in range(600):
            with contextlib.suppress(OSError):
                if self.rest("GET", "/v1/models/toy")[0] == 200:
                    return
            assert self.process.poll() is None, Path(self.log.name).read_text()
            time.sleep(0.1)
        raise AssertionError(f"the server did not come up: {Path(self.log.name).read_text()}")

    def rest(self, method: str, path: str, body=None, headers=()) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=30)
        body = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        with contextlib.closing(connection):
            return answer.status, answer.read()

    def stop(self) -> None:
        self.channel.close()
        self.process.terminate()
        self.process.wait(20)
        self.log.close()


@pytest.fixture(scope="session", params=["ours", *(["real"] if REAL else [])])
def server(request, tmp_path_factory, tiny_export):
    """One server for all cases: two versions of the toy model, with labels, and the parts of an export."""
    folder = tmp_path_factory.mktemp("conformance")
    for number, added in ADDED.items():
        save_toy(folder / "toy" / str(number), added)
    labels = 'version_labels { key: "stable" value: 1 } version_labels { key: "canary" value: 2 }'
    policy = "model_version_policy { specific { versions: 1 versions: 2 } }"
    models = [f'name: "toy" base_path: "{folder}/toy" {policy} {labels}']
    models += [
        f'name: "{part}" base_path: "{tiny_export}/{part}"' for part in ("text_encoder", "diffusion_model", "decoder")
    ]
    config = folder / "models.config"
    lines = "\n".join(f'config {{ {model} model_platform: "tensorflow" }}' for model in models)
    config.write_text(f"model_config_list {{ {lines} }}")
    monitoring = folder / "monitoring.config"
    monitoring.write_text('prometheus_config { enable: true path: "/monitoring/prometheus/metrics" }')
    arguments = (f"--model_config_file={config}", f"--monitoring_config_file={monitoring}", "--enable_batching=false")
    program = launcher(folder) if request.param == "ours" else REAL
    running = Server(
        program, folder, *arguments, "--enable_model_warmup=false", "--allow_version_labels_for_unavailable_models"
    )
    yield running
    running.stop()
