"""What is checked: each row is one model within bounds, and each bug a row that must be found in one of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One exhaustive search.

    Args:
        name: of the row.
        model: a file of this folder, without its suffix.
        bounds: what is in the model, and how much of it: names for the preprocessor.
        states: how many states it has. Who changes the model changes this.
    """

    name: str
    model: str
    bounds: tuple[str, ...]
    states: int


@dataclass(frozen=True)
class Bug:
    """A bug of `simulator.bugs` that can be reintroduced.

    Args:
        name: the mutant's name.
        flag: reintroduces it, as `-DBUG_` and this.
        check: the name of the check that must fail.
    """

    name: str
    flag: str
    check: str


CHECKS = (
    Check("leases", "cache", ("PINS",), 14_764),
    Check("loads", "cache", ("LOADS", "BACKUPS=1"), 724_417),
    Check("backups", "cache", ("LOADS", "BACKUPS=2", "HOST_PAGES=4"), 673_181),
    Check("storage", "cache", ("REQUESTS=1", "LOADS", "BACKUPS=2", "PREFETCH", "WRITES", "PINS"), 511_538),
    Check("ranks", "ranks", (), 453_898),
)

BUGS = (
    Bug("what is locked is evicted", "EVICT_LOCKED", "leases"),
    Bug("the upper half of a split is not locked", "SPLIT_UNLOCKED", "leases"),
    Bug("a lease publishes without moving its lock", "LOCK_NOT_MOVED", "leases"),
    Bug("a split leaves the host's pages with the lower half", "SPLIT_LEAVES_HOST", "loads"),
    Bug("the upper half of a split does not join the transfer", "SPLIT_LEAVES_TRANSFER", "loads"),
    Bug("a node is cut short though the host has it", "CUT_THOUGH_ON_HOST", "loads"),
    Bug("the pages of a lease that ends while it is loaded are free at once", "FREED_WHILE_LOADED", "loads"),
    Bug("a load is published before it has arrived", "LOAD_SETTLED_EARLY", "loads"),
    Bug("a failed load counts as arrived", "FAILED_LOAD_ARRIVED", "loads"),
    Bug("a device page is not locked while it is backed up", "DEVICE_NOT_LOCKED", "loads"),
    Bug("a host page is served before its copy has ended", "BACKUP_SETTLED_EARLY", "loads"),
    Bug("a failed copy counts as complete", "FAILED_COPY_ARRIVED", "loads"),
    Bug("evicted host pages are not returned to the pool", "HOST_PAGES_LOST", "loads"),
    Bug("a copy does not wait for its parent's", "PARENT_NOT_WAITED_FOR", "backups"),
    Bug("a failed copy is undone before the copies below it", "UNDONE_BEFORE_THOSE_BELOW", "backups"),
    Bug("pages that fail verification are accepted", "VERIFICATION_IGNORED", "storage"),
    Bug("batches are added in the order of their arrival", "ORDER_OF_ARRIVAL", "storage"),
    Bug("pages after a miss are accepted", "PAGES_AFTER_A_MISS", "storage"),
    Bug("every batch reads the keys of the first one", "KEYS_OF_THE_FIRST_BATCH", "storage"),
    Bug("a duplicate is freed twice", "DUPLICATE_FREED_TWICE", "storage"),
    Bug("a duplicate is lost", "DUPLICATE_LOST", "storage"),
    Bug("duplicates count as pages of the tree", "DUPLICATE_IS_THE_TREES", "storage"),
    Bug("host pages may be evicted while they are written to storage", "WRITTEN_UNLOCKED", "storage"),
    Bug("a rank uses its own votes", "OWN_VOTES", "ranks"),
    Bug("a rank uses its own gap in storage", "OWN_GAP", "ranks"),
    Bug("a rank uses its own lookup", "OWN_LOOKUP", "ranks"),
)
