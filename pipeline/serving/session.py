"""One SavedModel the way TF Serving runs it: TensorFlow 1's loader and the raw call of a session.

`tf.saved_model.load` is another path: stricter about arguments, with other texts. Python's own Session.run refuses
feeds that contradict a placeholder's shape, which the C++ server does not, so its inner call is used.
"""

import ctypes
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session

from pipeline.serving import status
from pipeline.serving.status import ServingError

INIT_OP = "__saved_model_init_op"  # a signature that is no function
MOST_SHAPES = 10_000  # that are remembered, so that memory stays bounded


def disable_xla() -> None:
    """Refuse XLA functions in this process from now on, as TF Serving does unless it is started with a flag."""
    library = ctypes.CDLL(str(Path(tf.__file__).parent / "libtensorflow_cc.so.2"))
    library._ZN10tensorflow21DisableXlaCompilationEv()


class Servable:
    """A loaded SavedModel; its signatures run from any thread."""

    def __init__(self, path: Path, tags: tuple[str, ...] = ("serve",), config: tf.compat.v1.ConfigProto | None = None):
        """Load it. Raises ServingError with the loader's own code."""
        self.path = path
        self.shapes: set = set()  # of inputs that have run: what XLA compiled a program for
        self._graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=self._graph, config=config)
        try:
            with self._graph.as_default():
                meta = tf.compat.v1.saved_model.load(self._session, list(tags), str(path))
        except Exception as error:
            self._session.close()
            raise to_serving_error(error) from error
        self.signatures = dict(meta.signature_def)
        self._session._extend_graph()

    def run(self, feeds: dict[str, np.ndarray], fetches: list[str], seconds: float | None = None) -> list[np.ndarray]:
        """Run the graph once.

        Args:
            feeds: name of a tensor in the graph -> its value. fetches: names of tensors.
            seconds: after which an operation that can be stopped is stopped; XLA's cannot.

        Raises:
            ServingError: what the session answered.
        """
        if self._session is None:
            raise ServingError(status.UNAVAILABLE, "the model is being unloaded")
        options = None
        try:
            tensors = {self._tensor(name): value for name, value in feeds.items()}
            outputs = [self._tensor(name) for name in fetches]
            if seconds is not None:
                milliseconds = max(1, int(seconds * 1000))
                message = tf.compat.v1.RunOptions(timeout_in_ms=min(milliseconds, 2**31 - 1))
                options = pywrap_tf_session.TF_NewBufferFromString(message.SerializeToString())
            results = self._session._call_tf_sessionrun(options, tensors, outputs, [], None)
        except Exception as error:
            raise to_serving_error(error) from error
        finally:
            if options is not None:
                pywrap_tf_session.TF_DeleteBuffer(options)
        if len(self.shapes) < MOST_SHAPES:
            self.shapes.add((tuple(fetches), tuple(sorted((k, v.shape) for k, v in feeds.items()))))
        return [np.asarray(result) for result in results]

    def close(self) -> None:
        """Free the variables. Nothing may be running."""
        session, self._session, self._graph = self._session, None, None
        session.close()

    def _tensor(self, name: str):
        return self._graph.get_tensor_by_name(name)._as_tf_output()


def to_serving_error(error: Exception) -> ServingError:
    """An exception of TensorFlow with its own code and text; of anything else INTERNAL, or INVALID_ARGUMENT."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, tf.errors.OpError):
        return ServingError(error.error_code, error.message)
    if isinstance(error, OSError):
        return ServingError(status.NOT_FOUND, str(error))
    # The session refuses arrays that it cannot turn into tensors; the loader unknown tags and broken files.
    code = status.INVALID_ARGUMENT if isinstance(error, ValueError | TypeError | KeyError) else status.INTERNAL
    return ServingError(code, str(error))
