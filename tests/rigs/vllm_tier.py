"""`MainstemTier` in vLLM's own hands: its factory makes it, and its contract is kept. Runs in vLLM's environment.

python vllm_tier.py SPEC
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

SIZE = 4096


def main(spec: str) -> None:
    """Stores chunks, finds them with a second tier, loads them; a lie and a drain."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    context = ReqContext(req_id="a")
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]

    def make(memory: Any) -> Any:
        config = {"type": "MainstemTier", "module_path": "mainstem.integrations.vllm", "storage": spec, "weights": "w"}
        return SecondaryTierFactory.create_secondary_tier(config, memoryview(memory), _spec())

    def ask(tier: Any, key: bytes) -> Any:
        while (found := tier.lookup(key, context)) is LookupResult.RETRY:
            time.sleep(0.001)
        return found

    def job(number: int, wanted: Any, chunks: list[int], promotion: bool) -> Any:
        return TransferJob(number, wanted, np.array(chunks), promotion, context)

    def end(tier: Any) -> list[Any]:
        while not (results := list(tier.get_finished_jobs())):
            assert tier.has_pending_work()
            time.sleep(0.001)
        return results

    memory = np.arange(8, dtype=np.int8)[:, None].repeat(SIZE, axis=1)
    tier = make(memory)
    assert ask(tier, keys[0]) is LookupResult.MISS
    tier.on_new_request(context)
    tier.submit_store(job(1, keys[:3], [4, 5, 6], promotion=False))
    (result,) = end(tier)
    assert result.job_id == 1 and result.success and result.transfer_bytes == 3 * SIZE
    assert [ask(tier, key) for key in keys] == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    tier.submit_load(job(2, keys, [0, 1, 2, 3], promotion=True))
    (result,) = end(tier)
    assert not result.success and list(result.successful_keys) == keys[:3]
    assert memory[:4, 0].tolist() == [4, 5, 6, 3]
    tier.submit_store(job(3, keys[3:], [7], promotion=False))
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert result.job_id == 3 and result.success and not tier.has_pending_work()
    tier.shutdown()
    again = make(memory)
    assert ask(again, keys[3]) is LookupResult.HIT, "it is there after a restart"
    again.shutdown()
    print("the contract is kept")


def _spec() -> Any:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    class Spec(OffloadingSpec):
        def get_manager(self) -> Any:
            raise NotImplementedError

        def get_worker(self, kv_caches: Any) -> Any:
            raise NotImplementedError

    return Spec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer 0",), 0),),
            worker_kv_bytes_per_block=SIZE,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="a",
            model=OffloadingModelConfig("tiny", "float32"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
