"""Block hashes and transfers: an engine inserts blocks in flight, and requests match them once they are committed."""

from __future__ import annotations

import mainstem

BLOCK = 16
tree = mainstem.Tree(page_size=1, keys=mainstem.HashKeys(16))
prompt = list(range(100))
blocks = mainstem.hash_blocks(prompt, BLOCK)  # six whole blocks; the last four tokens are ignored

transfer = tree.insert(blocks, page_ids=[20, 21, 22, 23, 24, 25], ready=False)
match = tree.match(blocks)
(evicted,) = tree.evict(6)
print(f"in flight: {match.length} blocks usable, {match.pending} pending, {len(evicted)} evictable")

tree.commit(transfer.node)
match = tree.match(mainstem.hash_blocks(prompt[:50] + [0] * 50, BLOCK))
print(f"committed: a prompt that differs from token 50 on reuses blocks {match.page_ids.tolist()}")
