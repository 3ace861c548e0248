"""Files for servers: parsed as the servers would parse them, checked against schemas, and equal to the contract."""

import http.server
import json
import re
import shlex
import shutil
import subprocess
import threading

import pytest
import yaml

from models.errors import InputError
from pipeline import manifest
from pipeline.serving import files, serve


def deployment(folder, gpu=False, base_path="/models"):
    return files.Deployment(manifest.read(folder), base_path, gpu, "registry.example:5000/tiny:1")


@pytest.fixture(scope="module")
def rendered(tiny_export):
    return files.render(deployment(tiny_export))


@pytest.fixture(scope="module", params=["cpu", "gpu with twins"])
def either(request, tiny_export, single_export):
    """(files of a deployment, the deployment)."""
    made = deployment(tiny_export) if request.param == "cpu" else deployment(single_export, gpu=True)
    return files.render(made), made


# === The server's files ===


def test_models_config_is_the_servers(tiny_export, rendered):
    """Parsed with the server's own message: every part once, absolute paths, newest version."""
    model_server_config_pb2 = pytest.importorskip("tensorflow_serving.config.model_server_config_pb2")
    from google.protobuf import text_format

    found = text_format.Parse(rendered["models.config"], model_server_config_pb2.ModelServerConfig())
    models = {model.name: model for model in found.model_config_list.config}
    assert models.keys() == manifest.read(tiny_export).signatures.keys()
    for name, model in models.items():
        assert model.base_path == f"/models/{name}" and model.model_platform == "tensorflow"
        assert not model.HasField("model_version_policy")


def test_the_monitoring_file_is_the_servers(tmp_path, rendered):
    config = pytest.importorskip("pipeline.serving.config")
    (tmp_path / "monitoring.config").write_text(rendered["monitoring.config"])
    assert config.read_monitoring_path(tmp_path / "monitoring.config") == "/monitoring/prometheus/metrics"


def test_flags_of_the_server(tiny_export, single_export):
    plain, gpu = (files.server_flags(d) for d in (deployment(tiny_export), deployment(single_export, gpu=True)))
    assert plain == [
        *("--port=8500", "--rest_api_port=8501", "--model_config_file=/models/serving/models.config"),
        *("--monitoring_config_file=/models/serving/monitoring.config", "--rest_api_timeout_in_ms=600000"),
    ]
    assert gpu[len(plain) :] == ["--xla_gpu_compilation_enabled=true"]
    assert files.server_flags(deployment(single_export))[-1] == "--xla_cpu_compilation_enabled=true"
    known = {name for name, *_ in serve.OPTIONS}
    assert {flag.removeprefix("--").partition("=")[0] for flag in gpu} <= known


# === Docker ===


def test_the_dockerfile(either):
    """What is copied is there; the server starts as process 2, as nobody, with the flags above."""
    made, its = either
    lines = [line for line in made["Dockerfile"].splitlines() if line and not line.startswith("#")]
    instructions = [line.split(" ", 1) for line in lines]
    assert {name for name, _ in instructions} <= {
        *("FROM", "USER", "RUN", "COPY", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD")
    }
    assert instructions[0] == ["FROM", "tensorflow/serving:2.20.0" + ("-gpu" if its.gpu else "")]
    copied = [rest.split() for name, rest in instructions if name == "COPY"]
    for *sources, target in copied:
        assert target.startswith("/models/")
        for source in sources:
            there = its.contract.folder / source
            assert there.is_dir() or source.removeprefix("serving/") in made, source
    assert {source for *sources, _ in copied for source in sources} >= {f"{p}/1" for p in its.contract.signatures}
    last = dict(instructions)
    assert last["USER"] == "nobody" and last["ENV"] == "TF_FORCE_GPU_ALLOW_GROWTH=true"
    assert json.loads(last["ENTRYPOINT"]) == ["/usr/bin/tini", "--", "tensorflow_model_server"]
    assert json.loads(last["CMD"]) == files.server_flags(its)
    kept = {line[1:] for line in made["Dockerfile.dockerignore"].splitlines() if line.startswith("!")}
    assert kept == {*(f"{part}/1" for part in its.contract.signatures), "serving"}


def test_the_compose_file(either):
    made, its = either
    [(name, service)] = yaml.safe_load(made["compose.yaml"])["services"].items()
    assert name == its.name and service["image"] == its.server_image
    assert service["entrypoint"] == ["tensorflow_model_server"] and service["command"] == files.server_flags(its)
    assert service["environment"] == {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} and service["volumes"] == ["..:/models:ro"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert ("deploy" in service) == its.gpu and service["init"] is True


# === Kubernetes ===


def documents(text):
    return list(yaml.safe_load_all(text))


def test_kubernetes_manifests_fit_the_schemas(either):
    """Kubernetes' own, strictly: an unknown field is an error."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    made, its = either
    found = documents(made["kubernetes.yaml"])
    assert [document["kind"] for document in found] == ["Deployment", "Service"]
    for document in found:
        kubernetes_validate.validate(document, "1.34", strict=True)
    pod = found[0]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"] == files.server_flags(its) and container["image"] == its.image
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == its.gpu
    assert pod["terminationGracePeriodSeconds"] > int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    targets = {port["targetPort"] for port in found[1]["spec"]["ports"]}
    assert targets == {port["name"] for port in container["ports"]}
    assert found[1]["spec"]["selector"] == found[0]["spec"]["template"]["metadata"]["labels"]
    container["unknown"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[0], "1.34", strict=True)


# Fields of an InferenceService's predictor that a pod has not.
OF_KSERVE = {"minReplicas": int, "timeout": int}


def test_the_kserve_manifest(either):
    """Its own schema is in no package: the outer fields by hand, the rest is a pod."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    made, its = either
    [service] = documents(made["kserve.yaml"])
    assert service.keys() == {"apiVersion", "kind", "metadata", "spec"} and service["spec"].keys() == {"predictor"}
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    predictor = service["spec"]["predictor"]
    for name, kind in OF_KSERVE.items():
        assert type(predictor.pop(name)) is kind
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": service["metadata"], "spec": predictor}
    kubernetes_validate.validate(pod, "1.34", strict=True)
    [container] = predictor["containers"]
    assert container["name"] == "kserve-container" and len(container["ports"]) == 1
    assert container["args"] == files.server_flags(its)


@pytest.mark.parametrize(("folder", "name"), [("SD 1.5 (v2)", "sd-1-5-v2"), ("123", "123"), ("Ä", "export")])
def test_names_are_labels_and_strings(tiny_export, tmp_path, folder, name):
    (tmp_path / folder).symlink_to(tiny_export)
    contract = manifest.read(tiny_export)
    object.__setattr__(contract, "folder", tmp_path / "real" / folder)
    made = files.Deployment(contract, "/models", False, "x:1")
    found = documents(files.kubernetes(made))
    assert made.name == name and found[0]["metadata"]["name"] == name
    assert re.fullmatch("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", made.name)


# === The probe ===


@pytest.mark.parametrize(
    ("states", "status"), [({}, 0), ({"decoder": "LOADING"}, 1), ({"diffusion_model": None}, 1), (None, 1)]
)
def test_the_probe_waits_for_every_model(rendered, states, status):
    """`states`: what differs from AVAILABLE; None: no server at all."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            model = self.path.removeprefix("/v1/models/")
            state = (states or {}).get(model, "AVAILABLE")
            body = {"model_version_status": [{"version": "1", "state": state}]} if state else {"error": "not found"}
            self.send_response(200 if state else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body, indent=1).encode())

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_address[1]
        if states is None:
            server.server_close()
        else:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        script = rendered["ready.sh"].replace("8501", str(port))
        assert shlex.split(script.splitlines()[2])[:3] == ["for", "model", "in"]
        assert subprocess.run(["bash", "-c", script], capture_output=True, timeout=20).returncode == status
        if states is not None:
            server.shutdown()


# === Writing ===


def test_files_are_written_whole_and_again(tiny_export, tmp_path):
    contract = manifest.read(tiny_export)
    object.__setattr__(contract, "folder", tmp_path)
    made = files.Deployment(contract, "/models", False, "tiny:1")
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "own.txt").write_text("kept")
    for _ in range(2):
        files.write(made)
        assert {path.name for path in (tmp_path / "serving").iterdir()} == {*files.render(made), "own.txt"}
    (tmp_path / "serving" / "compose.yaml").unlink()
    (tmp_path / "serving" / "compose.yaml").mkdir()
    with pytest.raises(InputError, match="serving: cannot be written"):
        files.write(made)


def test_the_command(run_command, single_export, tmp_path):
    refused = [
        ([], "expected one export, found 0"),
        ([single_export, "--base_path", "models"], "--base_path models: expected an absolute path"),
        ([single_export, "--image", "Not a name"], "--image Not a name: expected a name like"),
    ]
    for arguments, message in refused:
        run = run_command("pipeline.serving", "config", *arguments)
        assert run.returncode == 1 and message in run.stderr and "Traceback" not in run.stderr
    assert not (single_export / "serving").exists()
    shutil.copytree(single_export / "manifests", tmp_path / "copy" / "manifests")
    run = run_command("pipeline.serving", "config", tmp_path / "copy")
    assert run.returncode == 1 and "its SavedModels are not there" in run.stderr
