"""The whole cache in one thread, under one seed, in virtual time; every page that is read is checked.

    world       time, chance, what was counted
    ghost       content of pages: a function of identity, namespace, tokens, position, component and layer
    storage     a shared store that fails, lies and loses, and workers that are late or hang
    process     one process of the simulated machine: cache, tiers, store; may be killed at any step
    leases, requests, components, ranks      what is done with them: a profile each
    campaign    many seeds, one after another, in several processes
    mutants     known bugs made again, each to be found

A development tool: no part of the package needs it.
"""
