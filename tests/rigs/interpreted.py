"""The kernels for GPUs, run by Triton's interpreter on the CPU, or compiled where tests run on a GPU."""

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


def exact_kernels(patch: pytest.MonkeyPatch) -> None:
    """Has runners compute by the kernels for `--exact` on a GPU; skips the test where Triton is not installed.

    Keys are in spans of 32 and tiles of 16, so that short prompts have several. The interpreter multiplies by a library
    that may take other orders for other sizes: a product becomes a sum from the first number to the last.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    from mainstem.runtime.attention import triton_attention, triton_spans
    from mainstem.runtime.kernels import triton_linear

    patch.setattr(triton_spans, "SPAN", 32)
    patch.setattr(triton_attention, "BLOCK_BYTES", 512)
    if DEVICE != "cpu":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def in_order(builder: Any, a: Any, b: Any, total: Any, *others: Any) -> Any:
        left, right = _numbers(a), _numbers(b)
        own = np.zeros(total.data.shape, dtype=np.float32)
        for number in range(left.shape[1]):
            own += left[:, number, None] * right[None, number]
        return TensorHandle(total.data + own, total.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", in_order)
    patch.setattr("mainstem.runtime.models.runner.attention_for", lambda *_: triton_spans.SpanAttention())
    patch.setattr("mainstem.runtime.models.runner.kernels_for", lambda *_: triton_linear)


def _numbers(given: Any) -> Any:
    """The numbers of a tensor of the interpreter, float32."""
    import triton.language as tl

    if given.dtype.scalar != tl.bfloat16:
        return given.data.astype(np.float32)
    return (given.data.astype(np.uint32) << 16).view(np.float32)
