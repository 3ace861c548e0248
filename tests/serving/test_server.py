"""The server under load, attack and signals. Everything on loopback, in small pieces."""

import contextlib
import gzip
import http.client
import json
import select
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tensorflow as tf
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import model_management_pb2, predict_pb2

from pipeline.serving import rest, server, session, source, warmup
from pipeline.serving import serve as command
from pipeline.serving.status import ServingError

PREDICT = "/v1/models/toy:predict"


def toy_request(signature="", model="toy", **inputs) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for name, value in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    return request


def predict(client, timeout=30, **arguments) -> str:
    """Name of the status a call ends with."""
    try:
        client.predictions.Predict(toy_request(**arguments), timeout=timeout)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def slow(client, rounds) -> int:
    return client.rest("POST", PREDICT, {"signature_name": "slow", "inputs": rounds})[0]


@pytest.fixture
def base(toy, tmp_path) -> Path:
    """A folder of versions to change, with version 1 in it."""
    shutil.copytree(toy / "1", tmp_path / "toy" / "1")
    return tmp_path / "toy"


def publish(toy: Path, base: Path, number: int, origin: int = 2) -> None:
    """As it must be done: aside, then one rename."""
    shutil.copytree(toy / str(origin), base / f".tmp-{number}")
    (base / f".tmp-{number}").rename(base / str(number))


@pytest.fixture(scope="module")
def rounds(toy) -> int:
    """Of the slow signature, for about a second on this machine as busy as it is."""
    servable = session.Servable(toy / "2")
    signature = servable.signatures["slow"]
    feeds, fetches = {signature.inputs["n"].name: np.int32(300)}, [signature.outputs["trace"].name]
    servable.run(feeds, fetches)
    start = time.perf_counter()
    servable.run(feeds, fetches)
    return int(300 / (time.perf_counter() - start))


# === Versions ===


def test_a_hot_swap_under_load_fails_no_request(serve, toy, base):
    """Four clients without a pause; answers change once, from the old version's to the new one's."""
    client = serve(model_name="toy", model_base_path=str(base), max_queued=64, file_system_poll_wait_seconds=0.05)
    answers, done = [[] for _ in range(4)], threading.Event()

    def hammer(mine, over_rest):
        while not done.is_set():
            if over_rest:
                code, body = client.rest("POST", PREDICT, {"instances": [2.0]})
                assert code == 200, body
                mine.append(json.loads(body)["predictions"][0])
            else:
                mine.append(client.predictions.Predict(toy_request(x=[2.0]), timeout=30).outputs["y"].float_val[0])

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(hammer, mine, i % 2) for i, mine in enumerate(answers)]
        try:
            client.wait(lambda: all(answers))
            publish(toy, base, 2)
            client.wait(lambda: client.states() == {1: "END", 2: "AVAILABLE"})
            time.sleep(0.2)
        finally:
            done.set()
        for task in tasks:
            task.result()
    for mine in answers:
        swap = mine.index(4.0)
        assert mine == [3.0] * swap + [4.0] * (len(mine) - swap) and swap > 0


def test_a_version_whose_copy_was_killed_leaves_the_old_one(serve, toy, base):
    """Half a version under its number, as a killed copy leaves it, is told of and not served; the next one is."""
    options = {"file_system_poll_wait_seconds": 0.05, "max_num_load_retries": 1, "load_retry_interval_micros": 1000}
    client = serve(model_name="toy", model_base_path=str(base), **options)
    (base / "2").mkdir()
    (base / "2" / "saved_model.pb").write_bytes((toy / "2" / "saved_model.pb").read_bytes()[:1000])
    client.wait(lambda: client.states() == {1: "AVAILABLE", 2: "END"})
    status = json.loads(client.rest("GET", "/v1/models/toy/versions/2")[1])["model_version_status"][0]["status"]
    assert status["error_code"] != "OK" and status["error_message"]
    assert predict(client, x=[2.0]) == "OK"
    publish(toy, base, 3)
    client.wait(lambda: client.states() == {1: "END", 2: "END", 3: "AVAILABLE"})


def test_a_flipped_byte_in_any_file_of_an_export_is_found_before_it_is_loaded(tiny_export, tmp_path, monkeypatch):
    export = Path(shutil.copytree(tiny_export, tmp_path / "tiny"))
    origin, load = source.from_export(export, source.Policy()), server.loader(command.options())

    def refuse(*arguments):
        raise AssertionError("a damaged export was loaded")

    monkeypatch.setattr(session, "Servable", refuse)
    files = [path for path in sorted(export.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) > 10
    for path in files:
        whole = path.read_bytes()
        for place in {0, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(ServingError, match="^DATA_LOSS") as caught:
                load(origin, 1)
            assert str(tmp_path) not in caught.value.text
        path.write_bytes(whole)
    with pytest.raises(AssertionError, match="a damaged export was loaded"):
        load(origin, 1)  # whole again, it gets that far


def test_warmup_records_are_replayed_and_one_that_fails_fails_the_load(toy, tmp_path):
    from tensorflow_serving.apis import prediction_log_pb2

    def write(*requests):
        folder = Path(shutil.copytree(toy / "1", tmp_path / str(len(list(tmp_path.iterdir())))))
        path = folder / warmup.RECORDS
        path.parent.mkdir()
        with tf.io.TFRecordWriter(str(path)) as file:
            for request in requests:
                log = prediction_log_pb2.PredictionLog()
                log.predict_log.request.CopyFrom(request)
                file.write(log.SerializeToString())
        return session.Servable(folder), path

    servable, _ = write(toy_request(x=[2.0]), toy_request("matrix", model="whatever", x=[[1.0]]))
    assert warmup.replay(servable) == {"serving_default", "matrix"} and len(servable.shapes) == 2
    servable, _ = write(toy_request("fixed", x=[1.0, 2.0, 3.0]))
    with pytest.raises(ServingError, match="^INVALID_ARGUMENT: .*tf_serving_warmup_requests"):
        warmup.replay(servable)
    servable, path = write()
    path.write_bytes(b"no records at all, but long enough for a header")
    with pytest.raises(ServingError, match="^DATA_LOSS"):
        warmup.replay(servable)
    servable, _ = write(*[toy_request(x=[2.0])] * 1001)
    with pytest.raises(ServingError, match="more than 1000 warm-up records"):
        warmup.replay(servable)


# === Load ===


@pytest.fixture
def busy(serve, toy, rounds):
    """Function (seconds, **options) -> Client of a server whose device is busy for about as long."""
    threads = []

    def start(seconds=2, **options):
        client = serve(model_name="toy", model_base_path=str(toy), rest_api_timeout_in_ms=60_000, **options)
        client.first = ThreadPoolExecutor(1).submit(slow, client, seconds * rounds)
        threads.append(client.first)
        return client.wait(lambda: client.metric("running") == 1)

    yield start
    for first in threads:
        first.exception()


def test_200_clients_and_a_queue_of_8(busy):
    """One runs, eight wait, 191 are told when to return, over both protocols; and then all is as before."""
    client = busy(4, max_queued=8)
    start = threading.Barrier(199)

    def call(i):
        start.wait(60)
        return predict(client, 60, signature="slow", n=np.int32(1)) if i % 2 else slow(client, 1)

    with ThreadPoolExecutor(199) as pool:
        found = [str(answer) for answer in pool.map(call, range(199))]
    assert client.first.result() == 200
    assert found.count("OK") + found.count("200") == 8
    assert found.count("RESOURCE_EXHAUSTED") + found.count("429") == 191
    assert client.metric("rejected_total") == 191 and client.metric("queued") == client.metric("running") == 0
    assert slow(client, 1) == 200


def test_deadlines_pass_and_clients_leave_while_they_wait(busy):
    """Neither is ever run: the device goes from the first request to the last."""
    client = busy(3, max_queued=2)
    shapes = client.metric("input_shapes")
    assert predict(client, 0.2, signature="matrix", x=np.zeros((7, 7), "float32")) == "DEADLINE_EXCEEDED"
    body = json.dumps({"signature_name": "matrix", "inputs": [[1.0] * 9] * 9}).encode()
    with socket.create_connection(("127.0.0.1", client.rest_port)) as gone:
        head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        gone.sendall(head.encode() + body)
        client.wait(lambda: client.metric("queued") == 1)
    client.wait(lambda: client.metric("queued") == 0)
    assert client.metric("abandoned_total") + client.metric("expired_total") == 2
    assert client.metric("running") == 1, "the device was free before the test was done"
    assert slow(client, 1) == 200 and client.metric("input_shapes") == shapes


def test_a_full_queue_answers_rest_with_retry_after(busy):
    client = busy(max_queued=0)
    connection = http.client.HTTPConnection("127.0.0.1", client.rest_port, timeout=20)
    connection.request("POST", PREDICT, b"{}")
    answer = connection.getresponse()
    assert answer.status == 429 and int(answer.headers["Retry-After"]) >= 1
    assert "queue is full" in json.loads(answer.read())["error"]
    connection.close()
    with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED") as caught:
        client.predictions.Predict(toy_request(x=[2.0]), timeout=20)
    assert int(dict(caught.value.trailing_metadata())["retry-after"]) >= 1


def test_a_rest_request_has_its_time(serve, toy, rounds):
    client = serve(model_name="toy", model_base_path=str(toy), rest_api_timeout_in_ms=200)
    start = time.monotonic()
    assert slow(client, 20 * rounds) == 504 and time.monotonic() - start < 10
    assert client.rest("POST", PREDICT, {"instances": [2.0]})[0] == 200


# === Attacks ===


def test_slow_clients_hold_up_nobody(serve, toy, monkeypatch):
    """Heads that never end are cut off, bodies that never end get 504, others are served meanwhile."""
    monkeypatch.setattr(rest, "IDLE_SECONDS", 1.5)
    client = serve(model_name="toy", model_base_path=str(toy), rest_api_timeout_in_ms=1500)
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\n".encode()
    drip = [socket.create_connection(("127.0.0.1", client.rest_port)) for _ in range(100)]
    for i, connection in enumerate(drip):
        connection.sendall(head if i % 2 else head + b'Content-Length: 100\r\n\r\n{"inst')
        connection.settimeout(20)
    assert all(client.rest("POST", PREDICT, {"instances": [2.0]})[0] == 200 for _ in range(20))
    answers = [connection.recv(1000) for connection in drip]
    assert all(answer.startswith(b"HTTP/1.1 504") for answer in answers[::2])
    assert not any(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    for connection in drip:
        connection.close()
    assert client.rest("POST", PREDICT, {"instances": [2.0]})[0] == 200


def test_bodies_of_100_mb_are_refused_early(serve, toy):
    """By their length, by their pieces, unpacked or in a message of gRPC; and a shape that stands for gigabytes."""
    client = serve(model_name="toy", model_base_path=str(toy), max_request_mib=1)
    with socket.create_connection(("127.0.0.1", client.rest_port)) as told:
        told.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: {100 << 20}\r\n\r\n".encode())
        assert told.recv(100).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", client.rest_port)) as pieces:
        pieces.settimeout(20)
        sent, piece = 0, b"10000\r\n" + b" " * 65536 + b"\r\n"
        pieces.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        while not select.select([pieces], [], [], 0)[0]:
            pieces.sendall(piece)
            sent += len(piece)
            assert sent < 20 << 20, "refused, if at all, long after the limit of 1 MiB"
        assert pieces.recv(100).startswith(b"HTTP/1.1 413")
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 20}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(rest.BODIES):
            stack.enter_context(socket.create_connection(("127.0.0.1", client.rest_port))).sendall(head)
        client.wait(lambda: client.rest("POST", PREDICT, {"instances": [2.0]})[0] == 429)  # no room for more
    client.wait(lambda: client.rest("POST", PREDICT, {"instances": [2.0]})[0] == 200)
    bomb = gzip.compress(b" " * (100 << 20), 1)
    assert len(bomb) < 1 << 20
    assert client.rest("POST", PREDICT, bomb, {"Content-Encoding": "gzip"})[0] in (400, 413)
    assert predict(client, x=np.zeros(25 << 20, "float32")) == "RESOURCE_EXHAUSTED"
    huge = toy_request(x=[2.0])
    huge.inputs["x"].CopyFrom(tf.make_tensor_proto(np.zeros(1, "float32")))
    huge.inputs["x"].tensor_content, huge.inputs["x"].tensor_shape.dim[0].size = b"", 1 << 40
    huge.inputs["x"].float_val.append(1.0)
    with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
        client.predictions.Predict(huge, timeout=20)
    small = gzip.compress(b'{"instances": [2.0]}')
    assert client.rest("POST", PREDICT, small, {"Content-Encoding": "gzip"})[0] == 200
    assert predict(client, x=[2.0]) == "OK"


def test_one_broken_request_affects_no_other(serve, toy):
    client = serve(model_name="toy", model_base_path=str(toy), max_queued=200)
    broken = [
        {"x": [1.0, 2.0, 3.0], "signature": "fixed"},
        {"x": [b"a"]},
        {"z": [1.0]},
        {"signature": "no"},
        {"model": "no"},
    ]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: predict(client, **(broken[i % 5] if i % 2 else {"x": [2.0]})), range(200)))
    assert found[::2] == ["OK"] * 100 and "OK" not in found[1::2]


def test_reload_stays_beside_the_folders_the_server_began_with(serve, toy, base, tmp_path):
    """Models can be chosen over the network, the disk cannot."""
    client = serve(model_name="toy", model_base_path=str(base))

    def reload(*models):
        request = model_management_pb2.ReloadConfigRequest()
        for name, path in models:
            model = request.config.model_config_list.config.add(name=name, base_path=str(path))
            model.model_platform = "tensorflow"
        try:
            client.models.HandleReloadConfigRequest(request, timeout=30)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    shutil.copytree(toy / "2", tmp_path / "other" / "5")
    assert reload(("toy", base), ("other", tmp_path / "other")) == "OK"
    assert client.states("other") == {5: "AVAILABLE"} and predict(client, model="other", x=[2.0]) == "OK"
    for path in (toy, "/etc", tmp_path / "other" / ".." / ".." / "x"):
        assert reload(("toy", base), ("out", path)) == "PERMISSION_DENIED"
    assert reload(("toy", base), ("toy", base)) == "INVALID_ARGUMENT"
    assert reload(("toy", base)) == "OK"
    assert predict(client, model="other", x=[2.0]) == "NOT_FOUND" and predict(client, x=[2.0]) == "OK"


# === Start and stop ===


def test_ready_only_when_every_signature_has_run(serve, toy):
    client = serve(model_name="toy", model_base_path=str(toy))
    signatures = session.Servable(toy / "2").signatures.keys() - {session.INIT_OP}
    assert client.rest("GET", "/healthz")[0] == client.rest("GET", "/readyz")[0] == 200
    assert client.metric("input_shapes") >= len(signatures) - 3  # some take no zeros
    check = health_pb2_grpc.HealthStub(client.channel).Check
    for name in ("", "ModelService", "PredictionService"):
        assert check(health_pb2.HealthCheckRequest(service=name), timeout=20).status == 1
    assert client.stop() < 10
    with pytest.raises(OSError):
        client.rest("GET", "/readyz")


def test_stopping_finishes_what_runs_and_refuses_what_is_new(busy):
    """Also on connections that are open already; the time it takes is the running request's."""
    client = busy(3, max_queued=2)
    waiting = ThreadPoolExecutor(1).submit(slow, client, 1)
    client.wait(lambda: client.metric("queued") == 1)
    stopping = ThreadPoolExecutor(1).submit(client.stop)
    client.wait(lambda: client.rest("GET", "/readyz")[0] == 503)
    assert client.rest("POST", PREDICT, {"instances": [2.0]})[0] == 503 and predict(client, x=[2.0]) == "UNAVAILABLE"
    assert waiting.result() == 200 and stopping.result() < 20


def test_stopping_waits_no_longer_than_the_grace_period(busy):
    assert busy(4, grace_period=1.2).stop() < 3.0
