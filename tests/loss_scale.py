"""Megatron-LM's dynamic loss scale in plain Python, following its description."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class PlainScale:
    scale: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        self.left, self.clean = self.hysteresis, 0

    def step(self, overflow: bool) -> float:
        """Return the scale after a step."""
        if overflow:
            self.clean = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
        else:
            self.clean += 1
            if self.clean == self.window:
                self.clean = 0
                self.left = self.hysteresis
                self.scale *= 2.0
        return self.scale
