"""A host tier below the device, in NumPy on one screen: what the device evicts is loaded instead of computed again."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

import mainstem
from mainstem import HostPolicy, HostTier
from mainstem.tiers.host.transfer import Move
from mainstem.tiers.storage.sealer import HEADER_BYTES

PAGE_SIZE, WIDTH = 4, 8


class Copied:
    """The ticket of a copy that is done immediately; on a GPU it would belong to a stream."""

    error = None
    took_s = None  # nobody measured it

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def wait_layer(self, layer: int) -> None:
        pass


class NumpyMemory:
    """Device pages as rows of an array, host pages as slots of bytes: room for the storage header, and the content."""

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self.device = np.zeros((device_pages, PAGE_SIZE, WIDTH), np.float32)
        self.pages = host_pages
        self.host = np.zeros((host_pages, HEADER_BYTES + self.payload_bytes(0)), np.uint8)
        self.content = self.host[:, HEADER_BYTES:].view(np.float32).reshape(-1, PAGE_SIZE, WIDTH)

    def down(self, moves: Sequence[Move]) -> Copied:
        for _, source, target in moves:
            self.content[target] = self.device[source]
        return Copied()

    def up(self, moves: Sequence[Move]) -> Copied:
        for _, source, target in moves:
            self.device[target] = self.content[source]
        return Copied()

    def payload_bytes(self, component: int) -> int:
        return self.device[0].nbytes

    def slots(self, component: int, page_ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.host[page]) for page in page_ids]

    def regions(self) -> list[memoryview]:
        return [memoryview(self.host).cast("B")]


def run(cache: mainstem.PrefixCache, memory: NumpyMemory, prompt: list[int]) -> str:
    """Computes what no tier has of a prompt; returns how much came from where."""
    with cache.lease(prompt) as lease:
        device = lease.hit
        if (load := cache.tiers.load(lease)) is not None:
            load.wait()
        host = lease.hit - device
        lease.reserve(len(prompt) - lease.hit)
        for at in range(lease.hit, len(prompt)):
            memory.device[lease.page_table[at // PAGE_SIZE], at % PAGE_SIZE] = prompt[at]  # a model's keys and values
        read = memory.device[lease.page_table].reshape(-1, WIDTH)[: len(prompt), 0]
        assert read.tolist() == prompt, "attention reads what this prompt computes"
        lease.finish()
    cache.poll(time.monotonic())  # settles copies and begins new ones; a scheduler calls it in every step
    cache.poll(time.monotonic())
    return f"{device:2} on the device, {host:2} on the host, {len(prompt) - device - host:2} computed"


def main() -> None:
    memory = NumpyMemory(device_pages=12, host_pages=64)
    cache = mainstem.PrefixCache(12, PAGE_SIZE, host=HostTier(memory, HostPolicy(load_min_tokens=PAGE_SIZE)))
    prompts = {name: list(range(start, start + 41)) for name, start in (("A", 100), ("B", 200), ("C", 300))}
    for name in "AABCAB":
        print(f"{name}: {run(cache, memory, prompts[name])}")
    cache.check()


if __name__ == "__main__":
    main()
