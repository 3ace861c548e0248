"""A local server that speaks TF Serving's gRPC and REST: for development, tests and small deployments.

python -m pipeline.serving serve exports/emoji
python -m pipeline.serving serve --model_config_file exports/emoji/serving/models.config
python -m pipeline.serving serve --model_name half_plus_two --model_base_path /models/half_plus_two

The first form serves an export's parts as the models text_encoder, diffusion_model, decoder (and image_encoder), each
file checked against the manifest, and swaps to a new version of all of them at once. The others behave as the binary
tensorflow_model_server does and take its flags. In production run the official image tensorflow/serving.
"""

import logging
import types
from pathlib import Path

from absl import flags

from models.errors import InputError
from pipeline import cli, compile_cache, manifest

FLAGS = flags.FLAGS
# (name, default, what it does, bounds). The binary's have its names and, address and REST's port apart, its defaults.
OPTIONS = (
    ("host", "127.0.0.1", "Address to listen on. There is no authentication: think before 0.0.0.0."),
    ("port", 8500, "Port of gRPC; 0: none.", 0, 65535),
    ("rest_api_port", 8501, "Port of REST; 0: none.", 0, 65535),
    ("grpc_socket_path", "", "Unix socket for gRPC, besides the port."),
    ("xla", False, "Allow XLA functions; the next two, which are the binary's, do the same."),
    ("xla_cpu_compilation_enabled", False, "Allow XLA functions."),
    ("xla_gpu_compilation_enabled", False, "Allow XLA functions."),
    ("compile_cache", "default", f"Of an export: {compile_cache.HELP[0].lower()}{compile_cache.HELP[1:]}"),
    ("max_running", 1, "Runs on the device at a time.", 1),
    ("max_queued", 16, "Requests that may wait; more get RESOURCE_EXHAUSTED or 429.", 0),
    ("max_request_mib", 64, "Most MiB of a request, and of each tensor in it.", 1, 2047),
    ("grace_period", 30.0, "Seconds to finish what runs when told to stop.", 0.0),
    ("rest_api_timeout_in_ms", 30000, "Time of a REST request; pictures may need more.", 1),
    ("rest_api_enable_cors_support", False, "Let web pages of other origins read REST's answers."),
    ("num_versions", 1, "Newest versions of an export to serve at a time.", 1),
    ("verify", True, "Check the files of an export against its manifest before loading them."),
    ("model_config_file", "", "Models to serve, as a ModelServerConfig in protobuf's text format."),
    ("model_config_file_poll_wait_seconds", 0, "Seconds between looks at that file; 0: one look."),
    ("model_name", "default", "Name of the model in --model_base_path."),
    ("model_base_path", "", "Folder with a numbered folder per version of one model."),
    ("allow_version_labels_for_unavailable_models", False, "Accept labels of versions that are not loaded."),
    ("file_system_poll_wait_seconds", 1, "Seconds between looks for new versions; 0: one look."),
    ("max_num_load_retries", 5, "Further attempts to load a new version.", 0),
    ("load_retry_interval_micros", 60_000_000, "Microseconds between them."),
    ("tensorflow_session_parallelism", 0, "Threads of both of TensorFlow's pools; 0: its choice."),
    ("tensorflow_intra_op_parallelism", 0, "Threads within an operation; 0: TensorFlow's choice."),
    ("tensorflow_inter_op_parallelism", 0, "Threads across operations; 0: TensorFlow's choice."),
    ("tensorflow_session_config_file", "", "A ConfigProto in protobuf's text format."),
    ("per_process_gpu_memory_fraction", 0.0, "Share of a GPU's memory; 0: as much as is needed."),
    ("saved_model_tags", "serve", "Tags of the graph to load, with commas between them."),
    ("grpc_channel_arguments", "", "Options of the gRPC server: name=value,name=value."),
    ("enable_model_warmup", True, "Run every signature once before a version answers."),
    ("monitoring_config_file", "", "A MonitoringConfig; without it the page has its usual path."),
    ("enable_serialization_as_tensor_content", False, "Answer gRPC with raw bytes."),
    ("version", False, "Print versions and exit."),
)
# Flags of the binary that mean nothing here; given, they are named in a notice and the server starts.
IGNORED_SWITCHES = (
    *("enable_batching", "enable_per_model_batching_parameters", "flush_filesystem_caches", "enable_profiler"),
    *("enable_signature_method_name_check", "remove_unused_fields_from_bundle_metagraph", "skip_initialize_tpu"),
    *("enforce_session_run_timeout", "enable_grpc_healthcheck_service"),
)
IGNORED_VALUES = (
    *("batching_parameters_file", "rest_api_num_threads", "num_load_threads", "num_unload_threads", "grpc_max_threads"),
    *("num_request_iterations_for_warmup", "thread_pool_factory_config_file", "num_tflite_pools"),
    *("num_tflite_interpreters_per_pool", "mixed_precision", "total_model_memory_limit_bytes"),
)
# Flags of the binary without which a server would be another one than was asked for.
REFUSED = {
    "ssl_config_file": "TLS is not served here; put a proxy in front, or use tensorflow/serving",
    "use_alts_credentials": "ALTS is not served here",
    "platform_config_file": "only the tensorflow platform is served here",
    "prefer_tflite_model": "TFLite models are not served here",
    "use_tflite_model": "TFLite models are not served here",
}


def define_flags() -> None:
    """Flags of the command: OPTIONS, and those of the binary that are ignored or refused."""
    define = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
    for name, default, text, *bounds in OPTIONS:
        define[type(default)](name, default, text, *bounds)
    for name in IGNORED_SWITCHES:
        flags.DEFINE_bool(name, None, "Accepted, without effect here.")
    for name in IGNORED_VALUES:
        flags.DEFINE_string(name, None, "Accepted, without effect here.")
    for name, reason in REFUSED.items():
        flags.DEFINE_string(name, None, f"Refused: {reason}.")


def options(**changes) -> types.SimpleNamespace:
    """The values of OPTIONS, as `server` takes them: defaults but for the changes."""
    return types.SimpleNamespace(**{name: default for name, default, *_ in OPTIONS} | changes)


def main(argv):
    given = [name for name in REFUSED if FLAGS[name].value not in (None, "", "false")]
    if given:
        raise InputError(f"--{given[0]}: {REFUSED[given[0]]}")
    ways = [*argv[1:], *filter(None, [FLAGS.model_config_file or FLAGS.model_base_path])]
    if len(ways) != 1 and not FLAGS.version:
        raise InputError(
            f"expected an export, --model_config_file or --model_base_path, one of them, found {len(ways)}: "
            "python -m pipeline.serving serve exports/emoji"
        )
    if FLAGS.port == FLAGS.rest_api_port:
        raise InputError(f"--port and --rest_api_port are both {FLAGS.port}; they must differ")
    logging.getLogger("pipeline").setLevel(logging.INFO)
    for name in (*IGNORED_SWITCHES, *IGNORED_VALUES):
        if FLAGS[name].present:
            logging.getLogger("pipeline").info("--%s has no effect here", name)
    if argv[1:] and (FLAGS.xla or FLAGS.xla_cpu_compilation_enabled or FLAGS.xla_gpu_compilation_enabled):
        # Versions to come may be added to this one's programs: TensorFlow tells them apart.
        export_id = manifest.read(argv[1]).export_id
        compile_cache.start(compile_cache.folder(FLAGS.compile_cache), export_id)
    cli.import_tensorflow()
    try:
        from pipeline.serving import server
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs more packages ({error.name}): pip install -r requirements-serving.txt"
        ) from None
    if FLAGS.version:
        print(server.versions())
        return 0
    return server.run(options(**{name: FLAGS[name].value for name, *_ in OPTIONS}), Path(argv[1]) if argv[1:] else None)
