"""From flags to a running server: load, warm up, listen, be ready; and on SIGTERM drain and go."""

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import tensorflow as tf
from google.protobuf import text_format

from models.errors import InputError
from pipeline import load as device
from pipeline import manifest
from pipeline.serving import config, grpc_server, rest, session, source, status, warmup
from pipeline.serving.admission import Admission
from pipeline.serving.metrics import Metrics
from pipeline.serving.models import Models
from pipeline.serving.predict import Core
from pipeline.serving.source import Source
from pipeline.serving.status import ServingError

MONITORING_PATH = "/monitoring/prometheus/metrics"

log = logging.getLogger(__name__)


def versions() -> str:
    """What --version prints."""
    api = importlib.metadata.version("tensorflow-serving-api")
    return f"pipeline.serving, protocol of TensorFlow ModelServer {api}\nTensorFlow Library: {tf.__version__}"


def run(options, export: Path | None) -> int:
    """Serve until told to stop; the exit code. Raises InputError where nothing can be served."""
    device.prepare_device()
    tf.get_logger().setLevel("ERROR")  # the session loader calls itself deprecated
    if not (options.xla or options.xla_cpu_compilation_enabled or options.xla_gpu_compilation_enabled):
        session.disable_xla()
    core = asyncio.run(_serve_until_signal(options, export))
    if core.admission.running or core.models.loading():
        # Neither can be stopped, and Python would wait for their threads.
        log.warning("leaving %d run(s) and %d load(s) behind", core.admission.running, core.models.loading())
        sys.stdout.flush()
        os._exit(0)
    return 0


def loader(options):
    """The function that loads one version of a source, in a thread; it raises ServingError."""
    tags, settings = tuple(options.saved_model_tags.split(",")), session_config(options)

    def load(origin: Source, number: int) -> dict[str, session.Servable]:
        try:
            if origin.export is not None:
                contract = manifest.read(origin.export, number)
                if options.verify:
                    manifest.verify(contract)
            servables = {}
            for name in origin.names:
                servables[name] = servable = session.Servable(origin.path(name, number), tags, settings)
                if options.enable_model_warmup:
                    warmup.run_zeros(servable, warmup.replay(servable), strict=origin.export is not None)
            return servables
        except InputError as error:
            # Clients read this: what is wrong, not where on our disk.
            raise ServingError(status.DATA_LOSS, str(error).replace(f"{origin.where}/", "")) from error

    return load


def session_config(options) -> tf.compat.v1.ConfigProto:
    """Of every session. Raises InputError for a file that holds none."""
    found = tf.compat.v1.ConfigProto()
    if options.tensorflow_session_config_file:
        try:
            text_format.Parse(Path(options.tensorflow_session_config_file).read_text(encoding="utf-8"), found)
        except (OSError, text_format.ParseError) as error:
            raise InputError(f"--tensorflow_session_config_file: {error}") from error
    both = options.tensorflow_session_parallelism
    if both and (options.tensorflow_intra_op_parallelism or options.tensorflow_inter_op_parallelism):
        raise InputError("--tensorflow_session_parallelism sets both pools; leave the other two flags out")
    for field in ("intra_op_parallelism", "inter_op_parallelism"):
        if both or getattr(options, f"tensorflow_{field}"):
            setattr(found, f"{field}_threads", both or getattr(options, f"tensorflow_{field}"))
    if options.per_process_gpu_memory_fraction:
        found.gpu_options.per_process_gpu_memory_fraction = options.per_process_gpu_memory_fraction
    found.gpu_options.allow_growth = True
    return found


def find_sources(options, export: Path | None) -> list[Source]:
    """What the flags ask to serve. Raises InputError."""
    if export is not None:
        return [source.from_export(export, source.Policy(latest=options.num_versions))]
    if not options.model_config_file:
        return [Source(((options.model_name, Path(options.model_base_path)),))]
    try:
        return config.to_sources(config.read_models(Path(options.model_config_file)))
    except ServingError as error:
        raise InputError(f"--model_config_file {options.model_config_file}: {error.text}") from error


async def _serve_until_signal(options, export: Path | None) -> Core:
    """SIGTERM and SIGINT stop the server; a second one ends the process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def handle(number):
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return await serve(options, export, stop)


async def serve(options, export: Path | None, stop: asyncio.Event) -> Core:
    """Load, listen, and drain once `stop` is set; gives what it worked with. Raises InputError.

    Args:
        options: see `pipeline.serving.serve.options`. export: None: what the options name.
    """
    _check_ports(options)
    sources = find_sources(options, export)
    monitoring = MONITORING_PATH
    if options.monitoring_config_file:
        monitoring = config.read_monitoring_path(Path(options.monitoring_config_file))
    models = Models(loader(options), options.max_num_load_retries, options.load_retry_interval_micros / 1e6)
    admission = Admission(options.max_running, options.max_queued)
    core = Core(
        models, admission, Metrics(), options.max_request_mib << 20, options.enable_serialization_as_tensor_content
    )
    core.metrics.watch(core)
    labels = options.allow_version_labels_for_unavailable_models
    async with contextlib.AsyncExitStack() as stack:
        if options.file_system_poll_wait_seconds > 0:
            stack.enter_context(_background(models.watch(options.file_system_poll_wait_seconds)))
        if not await _until(stop, models.configure(sources, unavailable_labels=labels)):
            return core
        if options.model_config_file and options.model_config_file_poll_wait_seconds > 0:
            stack.enter_context(_background(_watch_config(options, models, sources, labels)))
        reload = _reloader(models, sources, labels)
        server, checks = grpc_server.make_server(core, reload, _grpc_options(options.grpc_channel_arguments))
        runner = rest.make_runner(
            core, options.rest_api_timeout_in_ms / 1000, monitoring, options.rest_api_enable_cors_support
        )
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(server.stop, 0.5)
        await _listen(options, server, runner)
        core.ready = True
        await grpc_server.set_health(checks, True)
        names = ", ".join(f"{v.model} {v.number}" for v in models.available())
        print(
            f"serving {names}: gRPC {options.host}:{options.port}, REST {options.host}:{options.rest_api_port}",
            flush=True,
        )
        await stop.wait()
        await _drain(core, checks, options.grace_period)
    return core


def _check_ports(options) -> None:
    """Loading takes a while; a port that is taken is told before."""
    for name in ("port", "rest_api_port"):
        port = getattr(options, name)
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                attempt.bind((options.host, port))
            except OSError as error:
                raise InputError(f"--{name} {port}: cannot listen on {options.host} ({error.strerror})") from error


async def _until(stop: asyncio.Event, work) -> bool:
    """Whether `work` was done before the stop; its errors are the user's."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        return False
    try:
        task.result()
    except ServingError as error:
        raise InputError(f"cannot serve: {error.text}") from error
    return True


@contextlib.contextmanager
def _background(work):
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()


def _grpc_options(text: str) -> list[tuple[str, object]]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    return [(name, int(value) if value.lstrip("-").isdecimal() else value) for name, _, value in pairs]


def _reloader(models: Models, started_with: list[Source], unavailable_labels: bool):
    """Clients may choose among the folders beside those the server was started with, and no others."""
    roots = {path.resolve().parent for origin in started_with for _, path in origin.base_paths}

    async def reload(message) -> None:
        if any(origin.export for origin in started_with):
            raise ServingError(status.FAILED_PRECONDITION, "this server serves an export; its models are fixed")
        sources = config.to_sources(message)
        for origin in sources:
            for name, path in origin.base_paths:
                if path.resolve().parent not in roots:
                    text = f"model {name}: its base_path is outside the folders this server was started with"
                    raise ServingError(status.PERMISSION_DENIED, text)
        await models.configure(sources, unavailable_labels=unavailable_labels)

    return reload


async def _watch_config(options, models: Models, current: list[Source], unavailable_labels: bool) -> None:
    while True:
        await asyncio.sleep(options.model_config_file_poll_wait_seconds)
        try:
            found = await asyncio.to_thread(find_sources, options, None)
            if found != current:
                await models.configure(found, unavailable_labels=unavailable_labels)
                current = found
        except (InputError, ServingError) as error:
            log.warning("--model_config_file stays as it was read before: %s", error)


async def _listen(options, server, runner) -> None:
    try:
        if options.port:
            server.add_insecure_port(f"{options.host}:{options.port}")
        if options.grpc_socket_path:
            server.add_insecure_port(f"unix:{options.grpc_socket_path}")
    except RuntimeError as error:
        raise InputError(f"--port {options.port}: cannot listen on {options.host} ({error})") from error
    await server.start()
    await runner.setup()
    if options.rest_api_port:
        try:
            await rest.web.TCPSite(runner, options.host, options.rest_api_port).start()
        except OSError as error:
            raise InputError(f"--rest_api_port {options.rest_api_port}: cannot listen ({error.strerror})") from error


async def _drain(core: Core, checks, grace: float) -> None:
    """Refuse what is new, finish what has begun, at most for the grace period."""
    log.info("stopping: %d request(s) in flight", core.active)
    core.ready, core.draining = False, True
    await grpc_server.set_health(checks, False)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(grace - 1.0, 0.0)):  # the rest is for the answers' last bytes
            while core.active:
                core.idle.clear()
                await core.idle.wait()
