"""What TensorFlow Serving needs beside the SavedModels, written into EXPORT/serving/ from the manifest.

python -m pipeline.serving config exports/emoji

models.config and monitoring.config for the server, ready.sh as a probe, a Dockerfile and compose.yaml for the official
image, kubernetes.yaml and kserve.yaml. No batching file: an export's batch is fixed, so a server cannot merge requests.
The text files are parsed and the YAML is checked against Kubernetes' schemas by the tests; neither Docker nor
Kubernetes was run.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from models.errors import InputError
from pipeline import manifest
from pipeline.manifest import Manifest
from pipeline.serving.client import PORTS, TIMEOUT_SECONDS

FLAGS = flags.FLAGS
IMAGE = "tensorflow/serving:2.20.0"
FOLDER = "serving"
# Without a signal handler the server dies at once when told to stop: by then, traffic must have gone elsewhere.
DRAIN_SECONDS = 60
LOAD_SECONDS = 1800  # of weights and warm-up, on a CPU


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What the files are made from."""

    contract: Manifest
    base_path: str  # of the export where the server runs
    gpu: bool
    image: str  # of the export with its server, as the Dockerfile makes it

    @property
    def name(self) -> str:
        """A DNS label."""
        name = re.sub("[^a-z0-9]+", "-", self.contract.folder.resolve().name.lower()).strip("-")
        return name[:50].rstrip("-") or "export"

    @property
    def server_image(self) -> str:
        """The official one."""
        return IMAGE + ("-gpu" if self.gpu else "")

    @property
    def weights(self) -> int:
        """Bytes."""
        paths = (self.contract.folder / name for name in self.contract.files if "/variables/" in name)
        return sum(path.stat().st_size for path in paths if path.exists())


def render(deployment: Deployment) -> dict[str, str]:
    """All files, name -> text."""
    return {
        "models.config": models_config(deployment),
        "monitoring.config": MONITORING,
        "ready.sh": ready(deployment),
        "Dockerfile": dockerfile(deployment),
        "Dockerfile.dockerignore": dockerignore(deployment),
        "compose.yaml": compose(deployment),
        "kubernetes.yaml": kubernetes(deployment),
        "kserve.yaml": kserve(deployment),
    }


def write(deployment: Deployment) -> list[Path]:
    """Write all files into EXPORT/serving/, each whole at every moment. Raises InputError where that cannot be."""
    folder = deployment.contract.folder / FOLDER
    written = []
    try:
        folder.mkdir(exist_ok=True)
        for name, text in render(deployment).items():
            temporary = folder / f".{name}.{os.getpid()}"
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, folder / name)
            written.append(folder / name)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from error
    return written


# === The server ===


def server_flags(deployment: Deployment) -> list[str]:
    """Of tensorflow_model_server."""
    where = f"{deployment.base_path}/{FOLDER}"
    xla = "gpu" if deployment.gpu else "cpu"
    return [
        f"--port={PORTS['grpc']}",
        f"--rest_api_port={PORTS['http']}",
        f"--model_config_file={where}/models.config",
        f"--monitoring_config_file={where}/monitoring.config",
        # 30 s by default, which pictures on a CPU outlast.
        f"--rest_api_timeout_in_ms={int(TIMEOUT_SECONDS * 1000)}",
        # The twins fail without it.
        *([f"--xla_{xla}_compilation_enabled=true"] if deployment.contract.xla_signatures else []),
    ]


MODEL = """  config {{
    name: {name}
    base_path: {base_path}
    model_platform: "tensorflow"
  }}
"""


def models_config(deployment: Deployment) -> str:
    """A ModelServerConfig: every part a model of its name, newest version wins."""
    models = [
        MODEL.format(name=json.dumps(part), base_path=json.dumps(f"{deployment.base_path}/{part}", ensure_ascii=False))
        for part in deployment.contract.signatures
    ]
    return f"model_config_list {{\n{''.join(models)}}}\n"


MONITORING = """prometheus_config {
  enable: true
  path: "/monitoring/prometheus/metrics"
}
"""


READY = """#!/bin/bash
# Ready is a server whose models have all loaded and warmed up; it answers long before that. The image has no curl.
for model in {models}; do
  exec 3<>/dev/tcp/127.0.0.1/{port} || exit 1
  printf 'GET /v1/models/%s HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n' "$model" >&3
  grep -q '"state": *"AVAILABLE"' <&3 || exit 1
done
"""


def ready(deployment: Deployment) -> str:
    """A probe: exits with 0 when every model answers."""
    return READY.format(models=" ".join(deployment.contract.signatures), port=PORTS["http"])


# === Docker ===


DOCKERFILE = """# {what} with its server.
# Not run by the tests of the toolkit that wrote it. To build and start it, EXPORT being the folder of the export:
#   docker build -t {image} -f EXPORT/{folder}/Dockerfile EXPORT
#   docker run --rm {gpus}-p 127.0.0.1:8500:8500 -p 127.0.0.1:8501:8501 {image}
# There is no authentication: keep the ports to yourself.
FROM {server_image}
USER root
# As process 1 the server would not hear SIGTERM.
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
{copies}
COPY {folder}/models.config {folder}/monitoring.config {folder}/ready.sh {base_path}/{folder}/
# Several models share the card: take what is needed, not all of it.
ENV TF_FORCE_GPU_ALLOW_GROWTH=true
USER nobody
EXPOSE {grpc} {http}
HEALTHCHECK --interval=10s --timeout=5s --start-period={load}s CMD ["bash", "{base_path}/{folder}/ready.sh"]
ENTRYPOINT ["/usr/bin/tini", "--", "tensorflow_model_server"]
CMD {flags}
"""


def dockerfile(deployment: Deployment) -> str:
    """The official image and this version of the export; the build's context is the export's folder."""
    version = deployment.contract.version
    copies = [f"COPY {part}/{version} {deployment.base_path}/{part}/{version}" for part in _parts(deployment)]
    return DOCKERFILE.format(
        **_values(deployment),
        copies="\n".join(copies),
        gpus="--gpus all " if deployment.gpu else "",
        flags=json.dumps(server_flags(deployment)),
    )


def dockerignore(deployment: Deployment) -> str:
    """Leaves other versions of the export out of the build's context."""
    kept = [f"!{part}/{deployment.contract.version}" for part in _parts(deployment)]
    return "\n".join(["*", *kept, f"!{FOLDER}", ""])


COMPOSE = """# {what}, from its own folder: new versions are served as they are exported.
# Not run by the tests of the toolkit that wrote it.
#   docker compose -f EXPORT/{folder}/compose.yaml up
services:
  "{name}":
    image: {server_image}
    entrypoint: ["tensorflow_model_server"]
    command:
{flags}
    environment:
      TF_FORCE_GPU_ALLOW_GROWTH: "true"
    volumes:
      - ..:{base_path}:ro
    # Loopback only: there is no authentication.
    ports: ["127.0.0.1:{grpc}:{grpc}", "127.0.0.1:{http}:{http}"]
    init: true
    read_only: true
    tmpfs: [/tmp]
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    restart: unless-stopped
    healthcheck:
      test: ["CMD", "bash", "{base_path}/{folder}/ready.sh"]
      interval: 10s
      timeout: 5s
      start_period: {load}s
"""
COMPOSE_GPU = """    deploy:
      resources:
        reservations:
          devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]
"""


def compose(deployment: Deployment) -> str:
    """The official image with the export's folder mounted."""
    text = COMPOSE.format(**_values(deployment), flags=_items(server_flags(deployment), 6))
    return text + (COMPOSE_GPU if deployment.gpu else "")


# === Kubernetes ===


KUBERNETES = """# {what}. Checked against Kubernetes' schemas, run on no cluster.
# Needs the image of the Dockerfile.
#   kubectl apply -f kubernetes.yaml
apiVersion: apps/v1
kind: Deployment
metadata:
  name: "{name}"
  labels: {{app: "{name}"}}
spec:
  replicas: 1
  selector:
    matchLabels: {{app: "{name}"}}
  template:
    metadata:
      labels: {{app: "{name}"}}
      annotations:
        prometheus.io/scrape: "true"
        prometheus.io/port: "{http}"
        prometheus.io/path: /monitoring/prometheus/metrics
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: {grace}
      containers:
        - name: server
          ports:
            - {{name: grpc, containerPort: {grpc}}}
            - {{name: http, containerPort: {http}}}
{container}
---
apiVersion: v1
kind: Service
metadata:
  name: "{name}"
spec:
  selector: {{app: "{name}"}}
  ports:
    - {{name: grpc, port: {grpc}, targetPort: grpc}}
    - {{name: http, port: {http}, targetPort: http}}
"""
CONTAINER = """image: "{image}"
args:
{flags}
env:
  - {{name: TF_FORCE_GPU_ALLOW_GROWTH, value: "true"}}
# Weights, and as much again as a picture needs.
resources:
  requests: {{memory: {memory}Mi}}
  limits: {{memory: {limit}Mi{gpus}}}
startupProbe:
  exec: {{command: [bash, {base_path}/{folder}/ready.sh]}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {failures}
readinessProbe:
  exec: {{command: [bash, {base_path}/{folder}/ready.sh]}}
  periodSeconds: 10
  timeoutSeconds: 5
lifecycle:
  preStop:
    # Until clients have gone elsewhere and what they asked for is done.
    exec: {{command: [sleep, "{drain}"]}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65534
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {{drop: [ALL]}}
  seccompProfile: {{type: RuntimeDefault}}
"""
KSERVE = """# {what}, for KServe. Checked against Kubernetes' schemas, run on no cluster.
# Needs the image of the Dockerfile.
# A container of our own: KServe's TensorFlow runtime serves one SavedModel, and a picture takes three.
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: "{name}"
  annotations:
    serving.kserve.io/deploymentMode: RawDeployment
spec:
  predictor:
    minReplicas: 1
    timeout: {timeout}
    automountServiceAccountToken: false
    terminationGracePeriodSeconds: {grace}
    containers:
      - name: kserve-container
        # KServe takes one port: REST here; for gRPC write {{name: h2c, containerPort: {grpc}, protocol: TCP}}.
        ports: [{{name: http1, containerPort: {http}, protocol: TCP}}]
{container}
"""


def kubernetes(deployment: Deployment) -> str:
    """A Deployment and a Service."""
    return KUBERNETES.format(**_values(deployment), container=_container(deployment, 10))


def kserve(deployment: Deployment) -> str:
    """An InferenceService."""
    return KSERVE.format(**_values(deployment), container=_container(deployment, 8))


def _container(deployment: Deployment, indent: int) -> str:
    memory = (deployment.weights >> 20) + 2048
    text = CONTAINER.format(
        **_values(deployment),
        flags=_items(server_flags(deployment), 2),
        memory=memory,
        limit=2 * memory,
        failures=LOAD_SECONDS // 10,
        gpus=", nvidia.com/gpu: 1" if deployment.gpu else "",
    )
    return "\n".join(" " * indent + line for line in text.splitlines())


def _items(values: Iterable[str], indent: int) -> str:
    # JSON's strings are YAML's.
    return "\n".join(f"{' ' * indent}- {json.dumps(value, ensure_ascii=False)}" for value in values)


def _parts(deployment: Deployment) -> list[str]:
    return list(deployment.contract.signatures)


def _values(deployment: Deployment) -> dict[str, object]:
    """What all templates may name."""
    contract = deployment.contract
    return {
        **{"name": deployment.name, "image": deployment.image, "server_image": deployment.server_image},
        **{"base_path": deployment.base_path, "folder": FOLDER, "grpc": PORTS["grpc"], "http": PORTS["http"]},
        **{"load": LOAD_SECONDS, "drain": DRAIN_SECONDS, "grace": DRAIN_SECONDS + 30, "timeout": int(TIMEOUT_SECONDS)},
        "what": f"{deployment.name} version {contract.version}, export {contract.export_id[:10]}",
    }


# === The command ===


def define_flags() -> None:
    """Flags of the command."""
    flags.DEFINE_integer("version", None, "Version of the export. Default: the newest.")
    flags.DEFINE_string("base_path", "/models", "The export's folder where the server runs; absolute.")
    flags.DEFINE_bool("gpu", False, "For the official image with CUDA.")
    flags.DEFINE_string("image", None, "Name of the image the Dockerfile makes. Default: NAME:VERSION.")


def main(argv):
    if len(argv) != 2:
        raise InputError(f"expected one export, found {len(argv) - 1}: python -m pipeline.serving config exports/emoji")
    contract = manifest.read(Path(argv[1]), FLAGS.version)
    if not all(contract.path(part).is_dir() for part in contract.signatures):
        raise InputError(f"{contract.folder}: its SavedModels are not there; servers need all of the export")
    base_path = FLAGS.base_path.rstrip("/")
    if not re.fullmatch("(/[A-Za-z0-9._-]+)+", base_path):
        raise InputError(f"--base_path {FLAGS.base_path}: expected an absolute path of letters, digits and . _ -")
    if FLAGS.image is not None and not re.fullmatch("[a-z0-9][A-Za-z0-9._:/@-]*", FLAGS.image):
        raise InputError(f"--image {FLAGS.image}: expected a name like registry/name:tag")
    deployment = Deployment(contract, base_path, FLAGS.gpu, "")
    image = FLAGS.image or f"{deployment.name}:{contract.version}"
    for path in write(dataclasses.replace(deployment, image=image)):
        print(path)
    print(f"python -m pipeline.serving serve {contract.folder}    # here, for trying it out")
    print(f"docker compose -f {contract.folder / FOLDER / 'compose.yaml'} up    # the official image")
