"""Linear layers and norms on a GPU, by kernels whose results do not depend on the number of rows.

A library of products chooses tiles, and how often it divides a sum, by the number of rows. Here each number of a
result is one sum, from the first input to the last, in steps of `INPUTS` and instructions of 16. Only the rows of a
tile follow their number: a row has the same instructions in each (docs/gpu.md). Norms have a program for each row.

See `linear` for what the functions are given. Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mainstem.runtime.kernels.linear import Weights

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that the kernels compute with."""

ROWS = (16, 32, 64, 128)
"""Rows of a tile: the fewest that hold all rows of a batch, and at most the last."""
OUTPUTS, INPUTS = 64, 64
"""Outputs of a tile, and inputs of a step."""
WARPS = 2
"""Of a tile: with four, compilers for Hopper would take another instruction from 64 rows on."""

_ALIGNED = 16  # bytes that are read at once: what begins elsewhere is compiled apart, and may be added up otherwise


def instructions() -> str:
    """Returns what computes: "triton 3.6.0 sm_90". Another compiler may take other instructions."""
    if triton.knobs.runtime.interpret:
        return f"triton {triton.__version__} interpreted"
    major, minor = torch.cuda.get_device_capability()
    return f"triton {triton.__version__} sm_{major}{minor}"


def takes(tensor: torch.Tensor) -> bool:
    """Returns whether the kernels can read a weight where it is."""
    return (
        type(tensor.data) is torch.Tensor
        and (tensor.is_cuda or triton.knobs.runtime.interpret)
        and tensor.dtype in DTYPES
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.data_ptr() % _ALIGNED == 0
    )


def products(x: torch.Tensor, layers: Sequence[Weights], *, rounds: bool = True) -> list[torch.Tensor]:
    """Computes layers that are given the same rows; see `linear.products`."""
    x = _read(x)
    *batch, inputs = x.shape
    rows = x.numel() // inputs
    tile = next((size for size in ROWS if size >= rows), ROWS[-1])
    results = []
    for weight, bias, codes in layers:
        outputs = len(weight)
        assert weight.shape[1] == inputs and weight.dtype is x.dtype and codes is None
        out = x.new_empty(*batch, outputs, dtype=x.dtype if rounds else torch.float32)
        if rows:
            _product[(-(-rows // tile), -(-outputs // OUTPUTS))](
                x,
                weight,
                bias,
                out,
                rows,
                outputs,
                WIDTH=inputs,
                ROWS=tile,
                OUTPUTS=OUTPUTS,
                STEP=INPUTS,
                num_warps=WARPS,
            )
        results.append(out)
    return results


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds: bool) -> torch.Tensor:
    """Divides rows by the root of their mean square; see `linear.rms_norm`."""
    return _normed(x, weight, None, epsilon, offset, rounds=rounds, centred=False)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Subtracts the mean of rows first, divides them, multiplies them by `weight` [width] and adds `bias` [width]."""
    return _normed(x, weight, bias, epsilon, 0.0, rounds=False, centred=True)


def _normed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    offset: float,
    *,
    rounds: bool,
    centred: bool,
) -> torch.Tensor:
    x = _read(x)
    out, width = torch.empty_like(x), x.shape[-1]
    assert weight.shape == (width,) and weight.dtype is x.dtype
    if x.numel():
        size = triton.next_power_of_2(width)
        _norm[(x.numel() // width,)](
            x,
            weight,
            bias,
            out,
            WIDTH=width,
            SIZE=size,
            EPSILON=epsilon,
            OFFSET=offset,
            ROUNDS=rounds,
            CENTRED=centred,
            num_warps=4 if size <= 4096 else 8,
            enable_fp_fusion=False,
        )
    return out


def _read(x: torch.Tensor) -> torch.Tensor:
    """Returns rows as the kernels read them: one after another, and aligned."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNED == 0 else x.clone()


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Computes a tile of a product: x [rows, WIDTH] and weight [outputs, WIDTH]. `out` rounds the sum with the bias."""
    row, output = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    at_row, at_output = row.to(tl.int64)[:, None] * WIDTH, output.to(tl.int64)[:, None] * WIDTH
    has_row, has_output = row[:, None] < rows, output[:, None] < outputs
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in range(0, WIDTH, STEP):
        at = begin + tl.arange(0, STEP)[None, :]
        a = tl.load(x + at_row + at, mask=has_row & (at < WIDTH), other=0.0)
        b = tl.load(weight + at_output + at, mask=has_output & (at < WIDTH), other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    into = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(into, total.to(out.dtype.element_ty), mask=has_row & (output < outputs)[None, :])


@triton.jit
def _norm(
    x,
    weight,
    bias,
    out,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Computes one row of a norm."""
    at, number = tl.program_id(0).to(tl.int64) * WIDTH, tl.arange(0, SIZE)
    exists = number < WIDTH
    own = tl.load(x + at + number, mask=exists, other=0.0).to(tl.float32)
    if CENTRED:
        own = tl.where(exists, own - tl.sum(own, 0) / WIDTH, 0.0)
    own *= tl.rsqrt(tl.sum(own * own, 0) / WIDTH + EPSILON)
    if ROUNDS:
        own = own.to(x.dtype.element_ty).to(tl.float32)
    own *= tl.load(weight + number, mask=exists, other=0.0).to(tl.float32) + OFFSET
    if bias is not None:
        own += tl.load(bias + number, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + at + number, own.to(out.dtype.element_ty), mask=exists)
