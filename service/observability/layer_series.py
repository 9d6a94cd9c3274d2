"""Layer series: metrics of what each layer has done, from which Open Inference's statistics are read.

Invariants: Updated at every heartbeat, not at every request (`LayerCounters` in `telemetry.py`). A reader gets the sum over all
processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.samples import Sample

from service.events import LayerTotals
from service.observability.series import PREFIX, Series
from service.observability.shared_values import Children

# The series of each field of LayerTotals and, beside the layer, its label.
_SUMS: dict[str, tuple[str, dict[str, str]]] = {
    "successes": ("layer_requests", {"outcome": "success"}),
    "failures": ("layer_requests", {"outcome": "failure"}),
    "success_s": ("layer_request_seconds", {"outcome": "success"}),
    "failure_s": ("layer_request_seconds", {"outcome": "failure"}),
    "decode_s": ("layer_phase_seconds", {"phase": "decode"}),
    "queue_s": ("layer_phase_seconds", {"phase": "queue"}),
    "compute_s": ("layer_phase_seconds", {"phase": "compute"}),
    "encode_s": ("layer_phase_seconds", {"phase": "encode"}),
    "sequences": ("layer_sequences", {}),
    "batches": ("layer_batches", {}),
}


class LayerSeries:
    """The series of every layer that has had a request."""

    def __init__(self, make: Series) -> None:
        texts = {
            "layer_requests": ("Requests to a layer that were answered, by outcome", "outcome"),
            "layer_request_seconds": (
                "Time of a layer's requests from the complete headers to the answer, by outcome",
                "outcome",
            ),
            "layer_phase_seconds": ("Time that successful requests spent in each phase", "phase"),
            "layer_sequences": ("Sequences in successful forward passes of a layer, probes excluded",),
            "layer_batches": ("Successful forward passes of a layer, probes excluded",),
        }
        self._sums = {
            name: Children(make.counter(name, text, ("layer", *labels))) for name, (text, *labels) in texts.items()
        }
        self._last_answer = Children(
            make.gauge(
                "layer_last_answer_timestamp_seconds",
                "Time of a layer's last successful answer, in seconds since the epoch",
                "max",
                ("layer",),
            )
        )

    def worked(self, sums: Mapping[str, LayerTotals]) -> None:
        """Add what layers have done since the last call."""
        for layer, done in sums.items():
            for field, (series, labels) in _SUMS.items():
                if amount := getattr(done, field):
                    self._sums[series][layer, *labels.values()].inc(amount)
            if done.last_answer_s:
                self._last_answer[layer,].set(done.last_answer_s)

    def totals(self, samples: Iterable[Sample]) -> dict[str, LayerTotals]:
        """Return what layers have done since the start, from the samples of all processes."""
        values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
        begin = f"{PREFIX}_layer_requests"
        layers = {dict(labels)["layer"] for name, labels in values if name.startswith(begin)}
        return {layer: self._totals(layer, values) for layer in layers}

    def _totals(self, layer: str, values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> LayerTotals:
        def value(name: str, labels: Mapping[str, str]) -> float:
            return values.get((f"{PREFIX}_{name}", frozenset({"layer": layer, **labels}.items())), 0.0)

        sums = {field: value(f"{series}_total", labels) for field, (series, labels) in _SUMS.items()}
        counts = {field: int(sums[field]) for field in ("successes", "failures", "sequences", "batches")}
        last = value("layer_last_answer_timestamp_seconds", {})
        return LayerTotals(**{**sums, **counts, "last_answer_s": last})  # type: ignore[arg-type]  # counts are ints
