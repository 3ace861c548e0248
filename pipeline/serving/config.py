"""The text files TF Serving is configured with: models.config and the monitoring file."""

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from tensorflow_serving.config import model_server_config_pb2

from models.errors import InputError
from pipeline.serving import status
from pipeline.serving.source import Policy, Source
from pipeline.serving.status import ServingError


def read_models(path: Path) -> model_server_config_pb2.ModelServerConfig:
    """models.config. Raises InputError when it is none."""
    return _parse(path, model_server_config_pb2.ModelServerConfig())


def to_sources(config: model_server_config_pb2.ModelServerConfig) -> list[Source]:
    """The models of a configuration. Raises INVALID_ARGUMENT for what cannot be served here."""
    if config.WhichOneof("config") != "model_config_list":
        raise ServingError(status.INVALID_ARGUMENT, "expected a model_config_list")
    sources = []
    for model in config.model_config_list.config:
        if not model.name or not model.base_path:
            raise ServingError(status.INVALID_ARGUMENT, "every model needs a name and a base_path")
        if model.model_platform not in ("", "tensorflow"):
            text = f"model {model.name}: platform {model.model_platform!r} is not served here, only tensorflow"
            raise ServingError(status.INVALID_ARGUMENT, text)
        labels = tuple((model.name, label, number) for label, number in sorted(model.version_labels.items()))
        policy = _policy(model.model_version_policy)
        sources.append(Source(((model.name, Path(model.base_path)),), None, policy, labels))
    return sources


def _policy(policy) -> Policy:
    kind = policy.WhichOneof("policy_choice")
    if kind == "all":
        return Policy(latest=None)
    if kind == "specific":
        return Policy(specific=tuple(policy.specific.versions))
    return Policy(latest=(policy.latest.num_versions or 1) if kind == "latest" else 1)


def read_monitoring_path(path: Path) -> str | None:
    """Where the monitoring file wants Prometheus' page; None where it wants none. Raises InputError."""
    prometheus = _parse(path, _monitoring_message()()).prometheus_config
    return (prometheus.path or "/monitoring/prometheus/metrics") if prometheus.enable else None


def _parse(path: Path, message):
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), message)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: Error parsing text-format {message.DESCRIPTOR.full_name}: {error}") from error


def _monitoring_message():
    """The message of a monitoring file, which the published stubs lack."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="monitoring.proto", package="pipeline.serving", syntax="proto3")
    prometheus = file.message_type.add(name="PrometheusConfig")
    prometheus.field.add(name="enable", number=1, type=kinds.TYPE_BOOL, label=kinds.LABEL_OPTIONAL)
    prometheus.field.add(name="path", number=2, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    monitoring = file.message_type.add(name="MonitoringConfig")
    name = ".pipeline.serving.PrometheusConfig"
    monitoring.field.add(
        name="prometheus_config", number=1, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_OPTIONAL, type_name=name
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pipeline.serving.MonitoringConfig"))
