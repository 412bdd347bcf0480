"""SGLang's real server on the CPU with HiCache: `python sglang_server.py ARGUMENTS`, those of `sglang.launch_server`.

Exchanged are: packages that are imported only for a GPU (empty modules), pinned host memory (plain memory), the kernel
that copies between device and host (PyTorch's indexing; layout "layer_first", back end of copies "direct"), and the
methods that streams lack on the CPU. Each of SGLang's processes imports this module, and so exchanges them.
"""

# ruff: noqa: E402  # what SGLang imports only for a GPU is replaced before it is imported
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch
import transformers

for _name in ("AutoProcessor", "AutoConfig", "AutoTokenizer", "AutoImageProcessor", "AutoModelForCausalLM"):
    getattr(transformers, _name)  # before the empty modules: it looks for torchvision

from bench.peers import allow_missing

allow_missing()

import sglang.srt.mem_cache.pool_host.mha as mha
from sglang.srt.mem_cache.pool_host.base import HostKVCache


def _copy(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _exchange() -> None:
    allocate = HostKVCache._allocate_host_buffer

    def allocate_unpinned(pool: Any) -> None:
        pool.pin_memory = False
        allocate(pool)

    HostKVCache._allocate_host_buffer = allocate_unpinned
    mha.transfer_kv_direct = _copy
    for name in ("synchronize", "wait_stream", "wait_event", "record_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, lambda self, *_: None)


_exchange()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
