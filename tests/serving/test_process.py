"""The server as a process: signals, XLA's switch, the command line, and the tests of tensorflow/serving itself."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

ROOT = Path(__file__).parents[2]
CHECKOUT = os.environ.get("TF_SERVING_CHECKOUT")
PREDICT = "/v1/models/toy:predict"


@pytest.fixture(scope="module")
def xla_server(toy, launch_in, tmp_path_factory):
    """(process, client, its folder): a server with XLA, whose programs lie in dumps/; toy/ has version 1."""
    folder = tmp_path_factory.mktemp("xla")
    (folder / "toy").mkdir()
    (folder / "toy" / "1").symlink_to(toy / "1")
    arguments = ("--model_name=toy", f"--model_base_path={folder}/toy", "--xla_cpu_compilation_enabled=true")
    with launch_in(folder) as start:
        yield *start(*arguments, XLA_FLAGS=f"--xla_dump_to={folder}/dumps --xla_dump_hlo_as_text"), folder


def test_wrong_shapes_compile_nothing(xla_server):
    """XLA writes down every program it compiles: none for a thousand wrong shapes."""
    _, client, folder = xla_server
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "toy"

    def call(size, signature="compiled_fixed"):
        request.model_spec.signature_name = signature
        request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.ones(size, "float32")))
        return client.predictions.Predict(request, timeout=20)

    compiled, shapes = len(list((folder / "dumps").iterdir())), client.metric("input_shapes")
    assert compiled > 0  # the compiled signatures ran before the server was ready
    for size in range(3, 1003):
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            call(size)
    assert list(call(2).outputs["y"].float_val) == [2.5, 2.5]
    assert len(list((folder / "dumps").iterdir())) == compiled and client.metric("input_shapes") == shapes
    call(7, "compiled")  # what has no guard compiles for each shape: the counter counts
    assert len(list((folder / "dumps").iterdir())) > compiled


def test_a_kill_during_a_hot_swap_and_a_stop_amid_a_request(xla_server, launch, toy, tmp_path):
    """Killed, a server leaves no lock and no half state: the next has the newest version. Told to, it drains."""
    process, client, folder = xla_server
    (folder / "toy" / "2").symlink_to(toy / "2")
    client.wait(lambda: client.states().get(2) in ("START", "LOADING"))
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL

    process, client = launch("--model_name=toy", f"--model_base_path={folder}/toy", "--grace_period=20")
    assert client.states() == {2: "AVAILABLE"}
    assert client.rest("POST", PREDICT, {"instances": [2.0]})[1].split() == b'{ "predictions": [4.0] }'.split()
    running = ThreadPoolExecutor(1).submit(client.rest, "POST", PREDICT, {"signature_name": "slow", "inputs": 3000})
    client.wait(lambda: client.metric("running") == 1)
    process.send_signal(signal.SIGTERM)
    assert running.result()[0] == 200 and process.wait(20) == 0
    log = (tmp_path / "server.log").read_text()
    assert "stopping: 1 request(s) in flight" in log and "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected an export, --model_config_file or --model_base_path, one of them, found 0"),
        (["a", "--model_base_path=b"], "one of them, found 2"),
        (["a", "--port=1", "--rest_api_port=1"], "--port and --rest_api_port are both 1; they must differ"),
        (["a", "--ssl_config_file=b"], "--ssl_config_file: TLS is not served here"),
    ],
)
def test_command_lines_that_cannot_be_served(run_command, arguments, message):
    run = run_command("pipeline.serving", "serve", *arguments)
    assert run.returncode == 1 and message in run.stderr and "Traceback" not in run.stderr


def test_help_says_what_the_server_is_for(run_command):
    shown = run_command("pipeline.serving", "serve", "--help").stdout
    assert "for development, tests and small deployments" in shown and "run the official image" in shown
    assert "--rest_api_timeout_in_ms" in shown
    assert "serve EXPORT" in run_command("pipeline.serving", "--help").stdout


@pytest.mark.skipif(not CHECKOUT, reason="TF_SERVING_CHECKOUT names no checkout of tensorflow/serving")
def test_the_tests_of_tensorflow_serving(write_launcher, tmp_path):
    """Its own integration test, by its own harness, with our launcher where the binary would be.

    Needs its packages (portpicker, six, psutil). Left out is what asks for other things than a session: TFLite,
    the profiler, the ops of tensorflow-text, models written by Keras 2.
    """
    sources, found = Path(CHECKOUT) / "tensorflow_serving", tmp_path / "tf_serving" / "tensorflow_serving"
    (found / "model_servers").mkdir(parents=True)
    write_launcher(found / "model_servers")
    (found / "servables").symlink_to(sources / "servables")
    # The checkout's package and that of the installed stubs are one package with two folders.
    code = f"import sys, pytest, tensorflow_serving; tensorflow_serving.__path__.append({str(sources)!r}); "
    code += "sys.exit(pytest.main(sys.argv[1:]))"
    test = sources / "model_servers" / "tensorflow_model_server_test.py"
    left_out = "not tflite and not profiler and not tf_text and not keras"
    command = [sys.executable, "-c", code, str(test), "-q", "-p", "no:cacheprovider", "-k", left_out, "-c", os.devnull]
    run = subprocess.run(command, env=os.environ | {"TEST_SRCDIR": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:]
