"""The attention kernel for GPUs, run by Triton's interpreter on the CPU, or compiled where tests run on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine import DEVICE

from mainstem.runtime.attention.paged import Attention


def triton_attention() -> Attention:
    """Returns the kernel; skips the test, with the reason, where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from mainstem.runtime.attention.triton_attention import TritonAttention

    if DEVICE == "cpu":
        _multiply_bfloat16()
    return TritonAttention()


def _multiply_bfloat16() -> None:
    """Makes the interpreter multiply bfloat16, whose bits it keeps as integers and would multiply as such."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply: Any = InterpreterBuilder.create_dot
    if multiply.__name__ == "widened":
        return

    def widened(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(builder, wide(a), wide(b), *others)

    def wide(given: Any) -> Any:
        if given.dtype.scalar != tl.bfloat16:
            return given
        bits = given.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    InterpreterBuilder.create_dot = widened
