"""A line through observations, of which older ones count less: y = a + b * x, with neither of them below 0."""

from __future__ import annotations


class Fit:
    """A least-squares fit over decaying weights.

    Args:
        alike: xs whose relative variance is at most this say nothing about the slope.
    """

    def __init__(self, alike: float) -> None:
        self._alike = alike
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float, kept: float, weight: float = 1.0) -> None:
        """Adds an observation; what is left of the weights of earlier ones is `kept`."""
        self._weight = kept * self._weight + weight
        self._x = kept * self._x + weight * x
        self._y = kept * self._y + weight * y
        self._xx = kept * self._xx + weight * x * x
        self._xy = kept * self._xy + weight * x * y

    @property
    def empty(self) -> bool:
        """Whether nothing was observed."""
        return self._weight == 0

    @property
    def mean(self) -> tuple[float, float]:
        """The mean of x and of y."""
        return self._x / self._weight, self._y / self._weight

    def line(self) -> tuple[float, float] | None:
        """Returns a and b; None: all xs are alike."""
        spread = self._weight * self._xx - self._x * self._x
        if spread <= self._alike * self._weight * self._xx:
            return None
        b = (self._weight * self._xy - self._x * self._y) / spread
        if b < 0:
            return self.mean[1], 0.0
        a = (self._y - b * self._x) / self._weight
        return (a, b) if a >= 0 else (0.0, self._xy / self._xx)
