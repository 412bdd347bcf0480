"""Compiles the kernels for NVIDIA GPUs, which needs none: python -m rigs.compiled 80 [kernel ...]

Prints a line for each kernel: the architecture, its name, and whether it multiplies in tensor cores. Of products it
prints the rows of a tile, by which they are named, and the instructions of tensor cores that their sum has.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from mainstem.runtime.attention import triton_attention, triton_spans
from mainstem.runtime.kernels import triton_linear

_HALF = {"query": "*bf16", "keys": "*bf16", "values": "*bf16", "out": "*bf16", "lse": None, "scale": "fp32"}
_READ = {"tasks": "*i32", "rows": "*i32", "page_ids": "*i32"}
_STRIDES = {"row_stride": "i32", "head_stride": "i32"}
_SIZES = {"KV_HEADS": 8, "GROUP": 4, "HEADS": 4, "ROWS": 64, "KEYS": 64, "PAGE": 16, "FIRST": 128, "REST": 0}
_PART = {**_HALF, **_READ, **_STRIDES, **_SIZES, "VALUE": 128, "CAP": None}
_PARTIAL = {"out": "*fp32", "lse": "*fp32"}
_LATENT = {"values": None, "KV_HEADS": 1, "GROUP": 128, "HEADS": 64, "KEYS": 16, "FIRST": 512, "REST": 64, "VALUE": 512}
_MERGE = {"results": "*fp32", "lse": "*fp32", "sinks": "*bf16", "out": "*bf16", "merged": "*i32", "firsts": "*i32"}
_NEW = {"key": "*bf16", "value": "*bf16", "keys": "*bf16", "values": "*bf16", "slots": "*i32", "tokens": "i32"}
_NEW_STRIDES = {"key_row": "i32", "key_head": "i32", "value_row": "i32", "value_head": "i32"}
_SPANS = {**_PART, "results": "*fp32", "lse": "*fp32", "sinks": None, "STEP": 256, "KEY": 128}
_NORM = {"x": "*bf16", "weight": "*bf16", "bias": None, "out": "*bf16", "WIDTH": 2048, "SIZE": 2048, "EPSILON": 1e-5}
_NORM |= {"OFFSET": 0.0, "ROUNDS": True, "CENTRED": False}
_PRODUCT = {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "out": "*bf16", "rows": "i32", "outputs": "i32"}
_PRODUCT |= {"WIDTH": 2048, "OUTPUTS": triton_linear.OUTPUTS, "STEP": triton_linear.INPUTS}
_WRITE = {**_NEW, **_NEW_STRIDES, "KV_HEADS": 8, "KEY": 128, "VALUE": 128, "SOME": 16}

KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "prefill": (triton_attention._part, _PART),
    "decode": (triton_attention._part, {**_PART, **_PARTIAL, "ROWS": 16, "CAP": 50.0}),
    "latent": (triton_attention._part, {**_PART, **_PARTIAL, **_LATENT}),
    "merge": (triton_attention.merge, {**_MERGE, "count": "i32", "ALL": 32, "VALUE": 128, "SOME": 8}),
    "write": (triton_attention._write, _WRITE),
    "spans": (triton_spans._spans, _SPANS),
    "norm": (triton_linear._norm, _NORM),
}
_FIXED = {"enable_fp_fusion": False}
OPTIONS: dict[Any, dict[str, Any]] = {triton_spans._spans: _FIXED, triton_linear._norm: _FIXED}
OPTIONS[triton_linear._product] = {"num_warps": triton_linear.WARPS}


def ptx(kernel: Any, arguments: dict[str, Any], architecture: int) -> str:
    """Returns the code of a kernel; arguments are names of types, or constants."""
    types = {name: given if isinstance(given, str) else "constexpr" for name, given in arguments.items()}
    constants = {(i,): arguments[name] for i, name in enumerate(kernel.arg_names) if types[name] == "constexpr"}
    aligned: Any = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    return str(compile(source, target=GPUTarget("cuda", architecture, 32), options=OPTIONS.get(kernel)).asm["ptx"])


if __name__ == "__main__":
    architecture, names = int(sys.argv[1]), sys.argv[2:] or [*KERNELS, *map(str, triton_linear.ROWS)]
    for name in names:
        if name in KERNELS:
            kernel, arguments = KERNELS[name]
            print(architecture, name, "mma" in ptx(kernel, {n: arguments[n] for n in kernel.arg_names}, architecture))
        else:
            kernel, arguments = triton_linear._product, {**_PRODUCT, "ROWS": int(name)}
            code = ptx(kernel, {n: arguments[n] for n in kernel.arg_names}, architecture)
            print(architecture, "products", name, *sorted({*re.findall(r"\S*mma\.\S*m\d+n\d+k\d+\S*", code)}))
