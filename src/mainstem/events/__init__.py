"""Events of a cache's contents, for routers that send a request to the server with the longest prefix of it.

    core journal  ->  Source  ->  on_event  ->  Publisher (a thread)  ->  ZeroMQ  ->  Follower  ->  Replica

`Source` turns what the core noted into events, `wire` writes them as vLLM does, `Feed` numbers and keeps them.
"""

from mainstem.events.source import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "Event", "Medium"]
