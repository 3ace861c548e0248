"""Run every signature once before a version answers, so that the first request finds everything built."""

import logging
import math
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

from pipeline.serving import predict, status, tensors
from pipeline.serving.session import INIT_OP, Servable
from pipeline.serving.status import ServingError

RECORDS = Path("assets.extra") / "tf_serving_warmup_requests"
MOST_RECORDS = 1000  # TF Serving's limit; more fail the load
# Zeros make no step of our loops, which would leave their bodies cold.
ONES = ("num_steps", "last_step")
# A signature may refuse zeros; that it answers is what counts.
REFUSALS = (status.INVALID_ARGUMENT, status.FAILED_PRECONDITION, status.OUT_OF_RANGE)
MOST_BYTES = 1 << 31

log = logging.getLogger(__name__)


def replay(servable: Servable) -> set[str]:
    """Run the requests that came with a SavedModel; the names of the signatures that they run.

    Raises:
        ServingError: a request failed, there are too many, or DATA_LOSS for a file that holds none.
    """
    path = servable.path / RECORDS
    if not path.exists():
        return set()
    seen = set()
    try:
        for i, record in enumerate(tf.data.TFRecordDataset(str(path)).as_numpy_iterator()):
            if i == MOST_RECORDS:
                raise ServingError(status.INVALID_ARGUMENT, f"{RECORDS}: more than {MOST_RECORDS} warm-up records")
            request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
            name, signature = predict.find_signature(servable.signatures, request.model_spec.signature_name)
            predict.check_inputs(signature, request.inputs)
            arrays = {key: tensors.to_array(proto, key, MOST_BYTES) for key, proto in request.inputs.items()}
            outputs = predict.choose_outputs(signature, request.output_filter)
            servable.run(predict.with_defaults(signature, arrays), [signature.outputs[alias].name for alias in outputs])
            seen.add(name)
    except tf.errors.OpError as error:
        raise ServingError(error.error_code, f"{RECORDS}: {error.message}") from error
    except ServingError as error:
        raise ServingError(error.code, f"{RECORDS}: {error.text}") from error
    except Exception as error:  # protobuf's own
        raise ServingError(status.DATA_LOSS, f"{RECORDS}: not a file of warm-up records ({error})") from error
    return seen


def run_zeros(servable: Servable, skip: set[str], strict: bool) -> None:
    """Run each signature on zeros, unknown sizes taken as 1.

    Args:
        skip: signatures that have run already. strict: fail where one breaks down, else only say so.

    Raises:
        ServingError: a signature broke down (`strict`).
    """
    for name, signature in servable.signatures.items():
        if name == INIT_OP or name in skip or not signature.outputs:
            continue
        feeds = {info.name: _zeros(key, info) for key, info in signature.inputs.items()}
        try:
            servable.run(feeds, [info.name for info in signature.outputs.values()])
        except ServingError as error:
            if "XLA compilation disabled" in error.text:
                log.info("%s needs --xla_cpu_compilation_enabled", name)
            elif strict and error.code not in REFUSALS:
                raise ServingError(error.code, f"{name} cannot run: {error.text}") from error
            else:
                log.info("%s does not take zeros: %s", name, error)


def _zeros(name: str, info) -> np.ndarray:
    dtype = tf.as_dtype(info.dtype)
    shape = [] if info.tensor_shape.unknown_rank else [max(dim.size, -1) for dim in info.tensor_shape.dim]
    shape = [1 if size < 0 else size for size in shape]
    if dtype == tf.string:
        return np.full(shape, b"", object)
    array = np.zeros(shape, dtype.as_numpy_dtype)
    return array + array.dtype.type(1) if name in ONES and math.prod(shape) == 1 else array
