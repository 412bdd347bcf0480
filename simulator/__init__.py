"""A deterministic simulator: the whole cache in one thread and virtual time, driven by a seed. It checks every read.

    world       time, random choices, counters
    ghost       content of pages: a function of identity, namespace, tokens, position, component and layer
    storage     a shared store that fails, lies and loses data, and workers that are late or get stuck
    process     one process of the simulated machine: cache, tiers, store; may be killed at any step
    leases, requests, components, ranks, advice, quotas      the workloads: one profile each
    network, loop       messages between machines; an event loop of asyncio in virtual time
    machines, peers, fronts, fleet           the replicas of a fleet, their pulls, its fronts, and its profile
    campaign    many seeds, one after another, in several processes
    record      writes what a campaign has done into the documentation
    bugs        known bugs, as patches
    mutants     those bugs reintroduced on purpose, each of which must be found

This is a development tool: the package does not depend on it.
"""
