"""Figures of a server, in the text format of Prometheus."""

from __future__ import annotations

import bisect
import collections
import itertools

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """How often a value was at most each of some bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str) -> list[str]:
        most = list(itertools.accumulate(self.counts))
        buckets = zip((*self.bounds, "+Inf"), most, strict=True)
        return [
            *(f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in buckets),
            f"{name}_sum {self.total}",
            f"{name}_count {most[-1]}",
        ]


class Metrics:
    """What is counted. For one thread, that of the event loop."""

    def __init__(self) -> None:
        self.requests: collections.Counter[tuple[str, int]] = collections.Counter()
        self.prompt_tokens = self.generated_tokens = 0
        self.first_token = Histogram((0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0))
        self.token = Histogram((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))

    def page(self, *, queue: int, running: int) -> str:
        """The whole page, with how many texts wait and grow now."""
        requests = [
            f'megatron_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        families = [
            ("requests_total", "counter", "requests by status; 499 is a client that hung up", requests),
            ("prompt_tokens_total", "counter", "tokens of prompts taken on", self.prompt_tokens),
            ("generated_tokens_total", "counter", "tokens generated", self.generated_tokens),
            ("queue_length", "gauge", "texts that wait", queue),
            ("running", "gauge", "texts that grow", running),
            (
                "time_to_first_token_seconds",
                "histogram",
                "from a request to the first token of its texts",
                self.first_token.lines("megatron_time_to_first_token_seconds"),
            ),
            (
                "seconds_per_token",
                "histogram",
                "of each token, what the step took that made it",
                self.token.lines("megatron_seconds_per_token"),
            ),
        ]
        lines = []
        for name, kind, meaning, found in families:
            lines += [f"# HELP megatron_{name} {meaning}", f"# TYPE megatron_{name} {kind}"]
            lines += found if isinstance(found, list) else [f"megatron_{name} {found}"]
        return "\n".join(lines) + "\n"
