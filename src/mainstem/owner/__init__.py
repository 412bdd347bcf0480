"""One owner a machine: a process that has a store open and holds its host tier for any number of processes.

    start       where the owner of a store is found, and how a client starts it
    protocol    what owner and clients say to each other
    client      the back end that clients use, `shared+SPEC`
    process     the process of an owner: its lock, its signals
    server      its connections
    held        the values: in shared memory, above the back end
    arena       which part of the memory is whose, and what is evicted
    memory      the shared memory

The owner holds no secret: clients seal and verify. Whoever can write to the shared memory, a process of the same user,
can do no more than any other writer to the store.
"""
