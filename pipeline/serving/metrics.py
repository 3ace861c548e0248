"""The numbers of the monitoring page, in Prometheus' format and, where TF Serving has them, under its names."""

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

PREFIX = ":tensorflow:serving:"
SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)  # buckets: a picture takes a while


class Metrics:
    """Counters of requests, and gauges that are read from the server when the page is asked for."""

    def __init__(self):
        self.registry = prometheus_client.CollectorRegistry()
        prometheus_client.disable_created_metrics()
        self._requests = prometheus_client.Counter(
            f"{PREFIX}request_count", "Requests by how they ended.", ("model_name", "status"), registry=self.registry
        )
        self._seconds = prometheus_client.Histogram(
            f"{PREFIX}request_latency_seconds",
            "From a request to its answer.",
            ("model_name", "API", "entrypoint"),
            buckets=SECONDS,
            registry=self.registry,
        )

    def count(self, model: str, api: str, entrypoint: str, code: str, seconds: float) -> None:
        """One finished request. `model` must be a served one or "": names from clients would grow without bound."""
        self._requests.labels(model, code).inc()
        self._seconds.labels(model, api, entrypoint).observe(seconds)

    def watch(self, core) -> None:
        """Add the queue's and the models' numbers to the page."""
        self.registry.register(_State(core))

    def page(self) -> bytes:
        """The page."""
        return prometheus_client.generate_latest(self.registry)


class _State:
    """Reads the numbers that others keep."""

    def __init__(self, core):
        self._core = core

    def collect(self):
        """Families of metrics, as prometheus_client asks for them."""
        admission, models = self._core.admission, self._core.models
        for name, text, value in (
            ("running", "Runs on the device.", admission.running),
            ("queued", "Requests that wait for the device.", admission.queued),
            ("ready", "1 when the server takes requests.", int(self._core.ready)),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        for name, text, value in (
            ("rejected", "Requests refused because the queue was full.", admission.rejected),
            ("expired", "Requests whose deadline passed in the queue.", admission.expired),
            ("abandoned", "Requests whose client left while they were queued.", admission.abandoned),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value)
        shapes = GaugeMetricFamily(
            f"{PREFIX}input_shapes", "Combinations of input shapes that have run.", labels=("model_name", "version")
        )
        for version in models.available():
            shapes.add_metric((version.model, str(version.number)), len(version.servable.shapes))
        yield shapes
