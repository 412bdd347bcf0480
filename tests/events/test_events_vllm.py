"""vLLM's own event types decode ours. It needs vLLM's environment: `make test-vllm`."""

from __future__ import annotations

import subprocess

import pytest
from machine import patience
from rigs.vllm_process import PYTHON
from skips import needs_vllm

from mainstem.events import AllBlocksCleared, BlockRemoved, BlockStored
from mainstem.events.wire import Batch, encode

DECODE = """
import sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
print("decoded:", msgspec.msgpack.Decoder(KVEventBatch).decode(bytes.fromhex(sys.argv[1])))
"""
pytestmark = [
    pytest.mark.deadline,
    pytest.mark.slow,
    needs_vllm,
]


def test_the_types_of_vllm_decode_what_is_published() -> None:
    events = [
        AllBlocksCleared(),
        BlockStored((2**64 - 1, 7), None, (1, 2, 3, 4), 2, "CPU", "french", "salt"),
        BlockStored((8,), 7, (5, 6), 2, "GPU"),
        BlockRemoved((8,), "STORAGE"),
    ]
    payload = encode(Batch(1.5, events, 0)).hex()
    done = subprocess.run(
        [PYTHON, "-c", DECODE, payload], capture_output=True, text=True, check=False, timeout=patience(240)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("decoded: "))
    rest = "extra_keys=None, group_idx=None, kv_cache_spec_kind=None, kv_cache_spec_sliding_window=None"
    nothing = "locality=None, ownership=None"
    assert line == (
        "decoded: KVEventBatch(ts=1.5, events=[AllBlocksCleared(), "
        "BlockStored(block_hashes=[18446744073709551615, 7], parent_block_hash=None, token_ids=[1, 2, 3, 4], "
        f"block_size=2, lora_id=None, medium='CPU', lora_name='french', {rest}, {nothing}, session_id=None), "
        "BlockStored(block_hashes=[8], parent_block_hash=7, token_ids=[5, 6], "
        f"block_size=2, lora_id=None, medium='GPU', lora_name=None, {rest}, {nothing}, session_id=None), "
        f"BlockRemoved(block_hashes=[8], medium='STORAGE', group_idx=None, {nothing})], data_parallel_rank=0)"
    )
