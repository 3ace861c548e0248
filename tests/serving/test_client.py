"""Pictures over a server: the same numbers as here, over gRPC and REST; and what is said when it cannot be."""

import concurrent.futures
import dataclasses
import functools
import http.server
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
from PIL import Image
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from models.errors import InputError
from models.export_spec import TensorSpec
from pipeline import generate, load, manifest, serving
from pipeline.serving import client, status, tensors
from pipeline.serving.status import ServingError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def contract(tiny_export):
    return manifest.read(tiny_export)


@pytest.fixture(params=["grpc", "http"])
def url(request, server):
    return address(server, request.param)


def address(server, scheme):
    return f"{scheme}://127.0.0.1:{server.port if scheme == 'grpc' else server.rest_port}"


@pytest.fixture
def no_waiting(monkeypatch):
    """Waits take no time; the list of them."""
    waits = []
    monkeypatch.setattr(client.time, "sleep", waits.append)
    return waits


# === The same numbers ===


def recorded(functions, seen):
    """The functions, noting every answer in `seen`."""

    def noting(name):
        def call(**inputs):
            answer = getattr(functions, name)(**inputs)
            seen.append((name, {key: np.asarray(value) for key, value in answer.items()}))
            return answer

        return call

    return dataclasses.replace(functions, **{name: noting(name) for name in manifest.CHAIN})


@pytest.fixture(scope="module")
def here(tiny_export):
    return load.local(tiny_export)


@pytest.fixture(scope="module")
def drawn_here(here):
    return draw(here)


def draw(functions):
    """A sampler with noise inside the loop, two calls of each batch, guided and not, negative prompts, weights."""
    seen = []
    how = {"sampler": "euler_a", "num_steps": 5, "guidance_end": 0.7, "steps_per_call": 2}
    texts = ["a red apple", "a (cat:1.3)", "the sea"]
    return generate.generate(recorded(functions, seen), texts, ["blue", None, None], seed=7, num_images=1, **how), seen


def test_a_server_draws_bit_for_bit_what_is_drawn_here(url, contract, drawn_here):
    (images, answers), (expected, expected_answers) = draw(serving.remote(url, contract)), drawn_here
    assert [name for name, _ in answers] == [name for name, _ in expected_answers]
    assert {"denoise", "denoise_unguided"} < {name for name, _ in answers}
    for (name, found), (_, wanted) in zip(answers, expected_answers, strict=True):
        assert found.keys() == wanted.keys()
        for key, value in found.items():
            assert value.dtype == wanted[key].dtype
            np.testing.assert_array_equal(value, wanted[key], err_msg=f"{name} {key}")
    np.testing.assert_array_equal(images, expected)


def test_other_signatures(url, contract):
    """PNG files travel as bytes; a number of steps as a number."""
    ask = client.connect(url)
    latent = np.random.default_rng(0).standard_normal((4, 9, 7, 4))
    [png] = client.function(ask, contract, "decoder", "decode_png")(latent=latent).values()
    pixels = client.function(ask, contract, "decoder", "serving_default")(latent=latent)["generated_images"]
    assert [bytes(picture[:4]) for picture in png] == [b"\x89PNG"] * 4 and pixels.dtype == np.uint8
    contexts = {name: np.zeros((4, 77, 32)) for name in ("context", "unconditional_context")}
    loop = client.function(ask, contract, "diffusion_model", "serving_default")
    drawn = loop(**contexts, num_steps=2, unconditional_guidance_scale=7.5)["latent"]
    assert drawn.shape == (4, 9, 7, 4) and np.isfinite(drawn).all()
    with pytest.raises(InputError, match="INVALID_ARGUMENT: .*num_steps must be in 1..12"):
        loop(**contexts, num_steps=13, unconditional_guidance_scale=7.5)
    with pytest.raises(InputError, match="denoise_xl"):
        client.function(ask, contract, "diffusion_model", "denoise_xl")


def test_what_does_not_fit_is_not_sent(url, contract):
    functions = serving.remote(url, contract)
    with pytest.raises(InputError, match=r"decoder/decode: latent must have shape \[4, 9, 7, 4\], found \[1\]"):
        functions.decode(latent=np.zeros(1))
    with pytest.raises(InputError, match=r"decoder/decode: missing inputs \['latent'\], unknown inputs \['image'\]"):
        functions.decode(image=np.zeros(1))
    with pytest.raises(InputError, match="latent must be float32, found"):
        functions.decode(latent=np.full((4, 9, 7, 4), "a"))


# === Another export there ===


def test_another_export_is_refused(url, contract):
    other = dataclasses.replace(contract, export_id="0" * 32)
    message = (
        f"text_encoder is export {contract.export_id}; the manifest in .* is of export {'0' * 32}: copy manifests/"
    )
    with pytest.raises(InputError, match=message):
        serving.remote(url, other)


def test_another_version_or_model_is_refused(url, contract):
    with pytest.raises(InputError, match="the server has version 1, the manifest in .* is version 2: copy the served"):
        serving.remote(url, dataclasses.replace(contract, version=2))
    more = {"image_encoder": {"encode_image": contract.signatures["decoder"]["decode"]}}
    signatures = contract.signatures | more
    with pytest.raises(
        InputError, match="image_encoder: the server has no such model; python -m pipeline.serving config"
    ):
        serving.remote(url, dataclasses.replace(contract, signatures=signatures))
    decode = contract.signatures["decoder"]["decode"]
    decode = dataclasses.replace(decode, outputs=(*decode.outputs, TensorSpec("more", (4,), "bool")))
    signatures = contract.signatures | {"decoder": contract.signatures["decoder"] | {"decode": decode}}
    with pytest.raises(InputError, match="decoder: decode has .*, the manifest says .*'more'"):
        serving.remote(url, dataclasses.replace(contract, signatures=signatures))


def test_a_model_that_tells_no_id_is_refused(url, contract):
    signatures = {"toy": {}}
    with pytest.raises(InputError, match="toy is no export of this toolkit"):
        client.check_export(client.connect(url), dataclasses.replace(contract, signatures=signatures), "toy")


def test_compiled_functions_must_be_in_the_export(url, contract):
    with pytest.raises(InputError, match="diffusion_model has no denoise_xla, .*export again with --jit_compile"):
        serving.remote(url, contract, jit_compile=True)
    with pytest.raises(InputError, match="--jit_components 'vae'"):
        serving.remote(url, contract, jit_components=("vae",))


@pytest.mark.parametrize(
    "url", ["", "localhost:8500", "ftp://a:1", "grpc://", "http://a:x", "http://a?b", "http://u@a"]
)
def test_urls_that_name_no_server(contract, url):
    with pytest.raises(InputError, match="expected grpc://HOST:8500 or http://HOST:8501"):
        serving.remote(url, contract)


# === Trouble on the way ===

SPEC = (TensorSpec("x", (2,), "float32"),)


@pytest.fixture
def troubled(contract):
    """Function (errors, timeout, names of part and signature) -> (function over a server with these, its calls)."""

    def make(errors, timeout=100.0, part="decoder", name="decode"):
        calls, left = [], list(errors)

        def predict(model, version, signature, inputs, outputs, seconds):
            calls.append(seconds)
            if left:
                raise left.pop(0)
            return {"x": np.zeros(2, "float32")}

        signatures = {part: {name: manifest.Signature(SPEC, SPEC)}}
        there = client.Server("grpc://there", predict, None, None)
        ask = client.function(there, dataclasses.replace(contract, signatures=signatures), part, name, timeout)
        return lambda: ask(x=[1, 2]), calls

    return make


def test_a_server_that_did_nothing_is_asked_again(troubled, no_waiting):
    full = ServingError(status.RESOURCE_EXHAUSTED, "the queue is full", retry_after=3)
    ask, calls = troubled([ServingError(status.UNAVAILABLE, "away"), full, ServingError(status.UNAVAILABLE, "away")])
    assert ask()["x"].tolist() == [0, 0] and len(calls) == 4
    assert 0.1 <= no_waiting[0] <= 0.25 and no_waiting[1] == 3 and 0.5 <= no_waiting[2] <= 1.0
    assert max(calls) <= 100.0


@pytest.mark.parametrize("code", [status.DEADLINE_EXCEEDED, status.INTERNAL, status.INVALID_ARGUMENT, status.UNKNOWN])
def test_what_may_have_run_is_not_asked_again(troubled, no_waiting, code):
    ask, calls = troubled([ServingError(code, "two\nlines")])
    with pytest.raises(InputError, match=f"^grpc://there: decoder/decode: {status.NAMES[code]}: two lines"):
        ask()
    assert len(calls) == 1 and no_waiting == []


def test_patience_has_an_end(troubled, no_waiting):
    away = [ServingError(status.UNAVAILABLE, "away")] * 9
    ask, calls = troubled(away)
    with pytest.raises(InputError, match="UNAVAILABLE: away; is the server running there"):
        ask()
    assert len(calls) == client.ATTEMPTS
    ask, calls = troubled([ServingError(status.RESOURCE_EXHAUSTED, "full", retry_after=11)], timeout=10.0)
    with pytest.raises(InputError, match="full; the server has all the work"):
        ask()
    assert len(calls) == 1
    ask, calls = troubled([ServingError(status.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 5)")])
    with pytest.raises(InputError, match="draw fewer images a call"):
        ask()
    assert len(calls) == 1
    ask, calls = troubled([ServingError(status.NOT_FOUND, "Servable not found for request: Specific(decoder, 1)")])
    with pytest.raises(InputError, match="the server has another version by now"):
        ask()


def test_fresh_noise_is_not_drawn_twice(troubled, no_waiting):
    ask, calls = troubled([ServingError(status.UNAVAILABLE, "away")], part="diffusion_model", name="serving_default")
    with pytest.raises(InputError, match="away"):
        ask()
    assert len(calls) == 1


def test_answers_that_are_not_what_was_promised(troubled, contract):
    ask, _ = troubled([])
    assert ask()
    there = client.Server("http://there", lambda *a: {"x": np.zeros(3, "float32")}, None, None)
    changed = dataclasses.replace(contract, signatures={"decoder": {"decode": manifest.Signature(SPEC, SPEC)}})
    with pytest.raises(InputError, match=r"x should be float32\[2\], found float32\[3\]"):
        client.function(there, changed, "decoder", "decode")(x=[1, 2])


@pytest.fixture
def grpc_server():
    """Function (answer to PredictRequests) -> URL."""
    running = []

    def start(answer):
        class Servicer(prediction_service_pb2_grpc.PredictionServiceServicer):
            def Predict(self, request, context):
                return answer(request, context)

        made = grpc.server(concurrent.futures.ThreadPoolExecutor(2), options=[("grpc.max_send_message_length", -1)])
        prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Servicer(), made)
        port = made.add_insecure_port("127.0.0.1:0")
        made.start()
        running.append(made)
        return f"grpc://127.0.0.1:{port}"

    yield start
    for made in running:
        made.stop(None)


def test_messages_over_grpcs_limit(grpc_server, contract):
    """4 MiB unless the manifest says that more will come."""
    large = TensorSpec("x", (5 << 18,), "float32")  # 5 MiB

    def answer(request, context):
        found = predict_pb2.PredictResponse()
        found.outputs["x"].CopyFrom(tensors.to_proto(np.arange(5 << 18, dtype="float32"), as_content=False))
        return found

    url = grpc_server(answer)
    changed = dataclasses.replace(contract, signatures={"decoder": {"decode": manifest.Signature((), (large,))}})
    with pytest.raises(InputError, match="RESOURCE_EXHAUSTED: .*larger than max"):
        client.function(client.connect(url), changed, "decoder", "decode")()
    assert 5 << 20 < client.largest_answer(changed) < 6 << 20 and client.largest_answer(contract) == 4 << 20
    found = client.function(client.connect(url, client.largest_answer(changed)), changed, "decoder", "decode")()
    assert found["x"][-1] == (5 << 18) - 1


def test_deadlines_and_advice_over_grpc(grpc_server, contract, no_waiting):
    release, asked = threading.Event(), []

    def answer(request, context):
        asked.append(request)
        if len(asked) == 1:
            context.set_trailing_metadata([("retry-after", "1")])
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        release.wait(10)
        return predict_pb2.PredictResponse()

    changed = dataclasses.replace(contract, signatures={"decoder": {"decode": manifest.Signature(SPEC, SPEC)}})
    ask = client.function(client.connect(grpc_server(answer)), changed, "decoder", "decode", timeout=1.5)
    with pytest.raises(InputError, match="DEADLINE_EXCEEDED: .*allow more time"):
        ask(x=[1, 2])
    release.set()
    assert no_waiting == [1] and len(asked) == 2
    assert asked[0].model_spec.version.value == 1 and asked[0].model_spec.signature_name == "decode"


ANSWERS = {
    "a web page": (200, b"<html>", "UNKNOWN: not an answer of TensorFlow Serving"),
    "other JSON": (200, b"[]", "UNKNOWN: not an answer of TensorFlow Serving"),
    "a gateway": (502, b"Bad gateway", "UNAVAILABLE: Bad gateway .HTTP 502."),
    "an error": (400, b'{"error": "no such thing"}', "INVALID_ARGUMENT: no such thing"),
    "too slow": (504, b'{"error": "timed out"}', "DEADLINE_EXCEEDED: timed out .* allow more time"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_that_are_no_servers(contract, no_waiting, case):
    code, body, message = ANSWERS[case]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        with pytest.raises(InputError, match=message):
            serving.remote(f"http://127.0.0.1:{made.server_address[1]}", contract)
        made.shutdown()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_nobody_there(contract, no_waiting, scheme):
    with pytest.raises(InputError, match="UNAVAILABLE: .*; is the server running there"):
        serving.remote(f"{scheme}://127.0.0.1:9", contract)
    assert len(no_waiting) == client.ATTEMPTS - 1


# === The command ===


@pytest.fixture
def copied(tiny_export, tmp_path):
    """What a client needs: manifest and tokenizer."""
    for name in ("manifests", "tokenizer"):
        shutil.copytree(tiny_export / name, tmp_path / "copy" / name)
    return tmp_path / "copy"


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture)


@pytest.fixture
def no_tensorflow(tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "tensorflow.py").write_text("raise SystemExit('TensorFlow was started')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))


def test_the_command_over_rest_needs_no_tensorflow(run_command, server, copied, tmp_path, no_tensorflow, here):
    arguments = ("--models", copied, "--server", address(server, "http"), "--output", tmp_path / "out")
    arguments += ("--num_steps", 5, "--preview_every", 2, "--num_images", 1, "--seed", 3)
    run = run_command("pipeline.generate", "a red apple", *arguments)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [str(tmp_path / "out" / "00000-3.png")]
    previews = sorted(path.name for path in (tmp_path / "out" / "previews").iterdir())
    assert previews == ["3-0002.png", "3-0004.png"]
    last, made = pixels(tmp_path / "out" / "previews" / "3-0004.png"), pixels(tmp_path / "out" / "00000-3.png")
    [expected] = generate.generate(here, "a red apple", seed=3, num_images=1, num_steps=5)
    np.testing.assert_array_equal(made, expected)
    assert last.shape == made.shape and not np.array_equal(last, made)


def test_interrupting_keeps_what_is_finished(server, copied, tmp_path, no_tensorflow):
    arguments = ["--models", copied, "--server", address(server, "http"), "--output", tmp_path / "out"]
    command = [sys.executable, "-m", "pipeline.generate", "a cat", "--num_images", "4000", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Tests that a shell started in the background ignore this signal, and so would what they start.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=heed, **pipes) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    paths = list((tmp_path / "out").glob("0*.png"))
    told = re.fullmatch(r"interrupted: (\d+) of 4000 pictures are finished", errors.splitlines()[-1])
    assert told and int(told[1]) in (len(paths), len(paths) - 1) and 1 <= len(paths) < 4000
    assert {pixels(path).shape for path in paths} == {(18, 14, 3)}
