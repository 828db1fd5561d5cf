"""Metrics of the server in Prometheus' text format."""

from __future__ import annotations

import bisect
import collections
import itertools

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Histogram with cumulative buckets."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str) -> list[str]:
        cumulative = list(itertools.accumulate(self.counts))
        buckets = zip((*self.bounds, "+Inf"), cumulative, strict=True)
        return [
            *(f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in buckets),
            f"{name}_sum {self.total}",
            f"{name}_count {cumulative[-1]}",
        ]


class Metrics:
    """Counters. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self.requests: collections.Counter[tuple[str, int]] = collections.Counter()
        self.prompt_tokens = self.generated_tokens = 0
        self.first_token = Histogram((0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0))
        self.token = Histogram((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))

    def page(self, *, queue: int, running: int) -> str:
        """Return the page, with the numbers of waiting and running sequences."""
        requests = [
            f'megatron_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        families = [
            ("requests_total", "counter", "requests by status; 499: closed by the client", requests),
            ("prompt_tokens_total", "counter", "prompt tokens of accepted requests", self.prompt_tokens),
            ("generated_tokens_total", "counter", "tokens generated", self.generated_tokens),
            ("queue_length", "gauge", "waiting sequences", queue),
            ("running", "gauge", "running sequences", running),
            (
                "time_to_first_token_seconds",
                "histogram",
                "time from a request to its first token",
                self.first_token.lines("megatron_time_to_first_token_seconds"),
            ),
            (
                "seconds_per_token",
                "histogram",
                "duration of the step that generated a token",
                self.token.lines("megatron_seconds_per_token"),
            ),
        ]
        lines = []
        for name, kind, description, values in families:
            lines += [f"# HELP megatron_{name} {description}", f"# TYPE megatron_{name} {kind}"]
            lines += values if isinstance(values, list) else [f"megatron_{name} {values}"]
        return "\n".join(lines) + "\n"
