"""A toy model with signatures of every kind, and servers that run it."""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
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
        "slow": signature(slow, n=(tf.int32, [])),
        "uneven": signature(lambda x: {"x": x, "z": tf.concat([x, x], 0)}, x=(tf.float32, row)),
        "compiled": signature(lambda x: {"y": compiled(x)}, x=(tf.float32, row)),
        "compiled_fixed": signature(lambda x: {"y": compiled(tf.ensure_shape(x, [2]))}, x=(tf.float32, [2])),
        "classify": signature(classify, inputs=(tf.string, row)),
        "regress": signature(lambda inputs: {"outputs": parse(inputs) / 2 + module.added}, inputs=(tf.string, row)),
    }
    tf.saved_model.save(module, str(folder), signatures)
    # Defaults of inputs are not part of what tf.saved_model.save takes.
    path = folder / "saved_model.pb"
    message = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    message.meta_graphs[0].signature_def["defaulted"].defaults["b"].CopyFrom(tf.make_tensor_proto([5], tf.int32))
    path.write_bytes(message.SerializeToString())


def slow(n):
    """About 0.3 ms a round on one core; it can be stopped between rounds."""
    one = tf.eye(200)
    _, last = tf.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, tf.linalg.matmul(x, one)), (0, one))
    return {"trace": tf.linalg.trace(last)}


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


class Client:
    """The least a client needs, and no more than the protocol."""

    def __init__(self, port: int, rest_port: int):
        self.port, self.rest_port = port, rest_port
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.predictions = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)

    def rest(self, method: str, path: str, body=None, headers=()) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=60)
        body = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()

    def states(self, model: str = "toy") -> dict[int, str]:
        """Version -> state."""
        found = json.loads(self.rest("GET", f"/v1/models/{model}")[1]).get("model_version_status", [])
        return {int(version["version"]): version["state"] for version in found}

    def metric(self, name: str, page: str = "/monitoring/prometheus/metrics") -> float:
        """Sum of what Prometheus' page says of a metric, all labels together."""
        lines = self.rest("GET", page)[1].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f":tensorflow:serving:{name}"))

    def wait(self, is_true, seconds: float = 60.0) -> "Client":
        """Until `is_true()`; while nobody listens it is not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if is_true():
                    return self
            time.sleep(0.02)
        raise AssertionError("waited in vain")


@contextlib.contextmanager
def launching(folder: Path):
    """Function (*arguments, program, **environment) -> (process, Client) of a server in a process of its own."""
    started = []

    def start(*arguments: str, program=None, **environment):
        client = Client(free_port(), free_port())
        command = [str(program or launcher(folder)), f"--port={client.port}", f"--rest_api_port={client.rest_port}"]
        with (folder / "server.log").open("a") as log:
            process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log, env=os.environ | environment)
        started.append((process, client))
        client.wait(lambda: process.poll() is not None or client.rest("GET", "/v1/models/toy")[0] == 200)
        assert process.poll() is None, (folder / "server.log").read_text()
        return process, client

    yield start
    for process, client in started:
        client.channel.close()
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def launch_in():
    """See `launching`."""
    return launching


@pytest.fixture(scope="session")
def write_launcher():
    """See `launcher`."""
    return launcher


@pytest.fixture
def launch(tmp_path):
    """See `launching`; the log is server.log."""
    with launching(tmp_path) as start:
        yield start


@pytest.fixture
def serve():
    """Function (export or None, **options) -> Client of a server in a thread of this process, where XLA is allowed.

    Its `stop()` drains it as SIGTERM does, and waits; it gives the seconds that took.
    """
    from pipeline.serving import serve as command
    from pipeline.serving import server

    running = []

    def start(export=None, **changes):
        client = Client(free_port(), free_port())
        options = command.options(port=client.port, rest_api_port=client.rest_port, **changes)
        stop, failed = threading.Event(), []

        async def main():
            event, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.run_in_executor(None, lambda: stop.wait() and loop.call_soon_threadsafe(event.set))
            try:
                await server.serve(options, export, event)
            finally:
                stop.set()

        def run():
            try:
                asyncio.run(main())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)

        def finish():
            start = time.monotonic()
            stop.set()
            thread.join(60)
            return time.monotonic() - start

        client.stop = finish
        running.append(client)
        thread.start()
        client.wait(lambda: failed or client.rest("GET", "/readyz")[0] == 200)
        if failed:
            raise failed[0]
        return client

    yield start
    for client in running:
        client.channel.close()
        client.stop()


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """Two versions of the toy model; tests must not change them."""
    folder = tmp_path_factory.mktemp("models") / "toy"
    for number, added in ADDED.items():
        save_toy(folder / str(number), added)
    return folder


@pytest.fixture(scope="session", params=["ours", *(["real"] if REAL else [])])
def server(request, tmp_path_factory, toy, tiny_export):
    """One server for all cases: two versions of the toy model, with labels, and the parts of an export."""
    folder = tmp_path_factory.mktemp("conformance")
    labels = 'version_labels { key: "stable" value: 1 } version_labels { key: "canary" value: 2 }'
    policy = "model_version_policy { specific { versions: 1 versions: 2 } }"
    models = [f'name: "toy" base_path: "{toy}" {policy} {labels}']
    parts = ("text_encoder", "diffusion_model", "decoder")
    models += [f'name: "{part}" base_path: "{tiny_export}/{part}"' for part in parts]
    config = folder / "models.config"
    lines = "\n".join(f'config {{ {model} model_platform: "tensorflow" }}' for model in models)
    config.write_text(f"model_config_list {{ {lines} }}")
    monitoring = folder / "monitoring.config"
    monitoring.write_text('prometheus_config { enable: true path: "/monitoring/prometheus/metrics" }')
    arguments = (f"--model_config_file={config}", f"--monitoring_config_file={monitoring}", "--enable_batching=false")
    arguments += ("--enable_model_warmup=false", "--allow_version_labels_for_unavailable_models")
    with launching(folder) as start:
        yield start(*arguments, program=None if request.param == "ours" else REAL)[1]
