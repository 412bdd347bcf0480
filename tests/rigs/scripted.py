"""A model that says what a test wants: its KV and logits are real, but the next token is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.segments import Segment


class Scripted(ModelRunner):
    """Samples `script` in order; without tokens left, what the model itself would. One request at a time.

    Args:
        arguments: of `ModelRunner`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.script: deque[int] = deque()

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        logits = super().forward(segments).clone()
        if self.script and len(logits) == 1:
            logits[0, self.script.popleft()] = 1e4
        return logits
