/* Leases, tiers and copies over the tree of `tree.pml`, in every order, within the bounds that are set by -D.

   Two requests, one for each prompt, come and go without end. Actions have the names of the functions that they model.
   After each of them check() asserts what Tree::check, Cache::check and HostPages.check assert, and what no code could
   afford to check: that each page in the tree, or computed by a request, has the KV of its tokens, and that what a copy
   reads or writes belongs to it.

   -DBUG_... reintroduces a bug of `simulator/bugs.py`; `python -m proof` reintroduces each and sees it found. */

#ifndef BACKUPS
#define BACKUPS 0 /* at once: 0 to 2 */
#endif
#ifndef REQUESTS
#define REQUESTS 2
#endif

#include "tree.pml"

#define OPEN 1
#define ABANDONED 2 /* its lease has ended while a copy writes to its pages */

#define RUNNING 1
#define DONE 2
#define BROKEN 3 /* the copy failed */
#define CANCELLED 4 /* it has failed, but copies below it are under way */

/* -------------------------------------------------------------------------------------------------- leases */

#define T(r, i) ((r) * N + (i))

byte phase[2];
byte node[2];     /* locked on the device: the end of what the lease has published; 0: nothing */
byte table[6];    /* device pages, as T(r, i) */
byte size[2];     /* pages in the table */
byte computed[2]; /* of these */

#define OWNED(r) END(node[r])

#ifdef LOADS
byte host_node[2]; /* locked on the host, until a load has ended */
byte load[2];      /* the ticket of its copy */
bool fresh[2];     /* it may still load */
byte loaded[2];    /* pages copied so far */
byte source[6];    /* host pages, as T(r, i) */
#define LOADING(r) (load[r] != 0)
#define HOST_NODE(r) (host_node[r])
#else
#define LOADING(r) (false)
#define HOST_NODE(r) 0
#endif

inline lease(r) { /* Lease::Lease */
  match(r);
  phase[r] = OPEN;
  node[r] = high;
  lock(DEVICE, high);
#ifdef LOADS
  if :: low != high -> host_node[r] = low; fresh[r] = true; lock(HOST, low) :: else -> skip fi;
#endif
  i = 0;
  do
  :: i < END(node[r]) -> table[T(r, i)] = ids[C(DEVICE, AT(r, i))]; i++
  :: else -> break
  od;
  size[r] = i;
  computed[r] = i
}

inline reserve(r) { /* Lease::reserve: one page; what it evicts is an action of its own */
  allocate(DEVICE, AT(r, size[r]), table[T(r, size[r])]);
#ifdef LOADS
  fresh[r] = false;
#endif
  size[r]++
}

inline compute(r) { /* a forward of one page, which reads all before it */
  i = 0;
  do
  :: i < computed[r] -> assert(kv[P(DEVICE, table[T(r, i)])] == AT(r, i)); i++
  :: else -> break
  od;
  assert(owner[P(DEVICE, table[T(r, i)])] == PRIVATE);
  kv[P(DEVICE, table[T(r, i)])] = AT(r, i);
  computed[r]++
}

inline publish(r) { /* Lease::publish_pages */
  i = 0;
  do :: i < N -> mine[i] = table[T(r, i)]; i++ :: else -> break od;
  j = OWNED(r);
  insert(DEVICE, r, node[r], j, computed[r]);
#ifdef BUG_LOCK_NOT_MOVED
  node[r] = k_;
#else
  move_lock(DEVICE, node[r], k_);
  node[r] = k_;
#endif
  i = j;
  do /* Paged::adopt */
  :: i < until ->
     if
     :: i < existing ->
        release(DEVICE, table[T(r, i)], PRIVATE);
        table[T(r, i)] = ids[C(DEVICE, AT(r, i))]
     :: else -> hand_over(DEVICE, table[T(r, i)])
     fi;
     i++
  :: else -> break
  od;
  skip
}

inline free_private(r) { /* Cache::end */
  j = OWNED(r);
  unlock(DEVICE, node[r]);
  i = 0;
  do
  :: i < size[r] ->
     if :: i >= j -> release(DEVICE, table[T(r, i)], PRIVATE) :: else -> skip fi;
     table[T(r, i)] = 0;
     i++
  :: else -> break
  od;
  phase[r] = 0; node[r] = 0; size[r] = 0; computed[r] = 0
}

#ifdef LOADS
inline begin_load(r) { /* Lease::begin_load: host pages into private pages of the lease */
  i = size[r];
  do
  :: i < END(host_node[r]) ->
     allocate(DEVICE, AT(r, i), table[T(r, i)]);
     source[T(r, i)] = ids[C(HOST, AT(r, i))];
     i++
  :: else -> break
  od;
  loaded[r] = size[r];
  fresh[r] = false;
  size[r] = i;
  load[r] = RUNNING
}

inline copy_up(r) {
  assert(owner[P(HOST, source[T(r, loaded[r])])] == CACHED);
  assert(owner[P(DEVICE, table[T(r, loaded[r])])] == PRIVATE);
  kv[P(DEVICE, table[T(r, loaded[r])])] = kv[P(HOST, source[T(r, loaded[r])])];
  loaded[r]++;
  if :: loaded[r] == END(host_node[r]) -> load[r] = DONE :: else -> skip fi
}

inline release_host(r) {
  at = host_node[r];
  host_node[r] = 0;
  unlock(HOST, at);
  i = 0;
  do :: i < N -> source[T(r, i)] = 0; i++ :: else -> break od;
  fresh[r] = false;
  loaded[r] = 0;
  load[r] = 0
}

inline end_load(r) { /* Lease::end_load, or Cache::end_load once the lease has ended */
#ifdef BUG_FAILED_LOAD_ARRIVED
  if :: phase[r] == OPEN -> computed[r] = END(host_node[r]) :: else -> skip fi;
#else
  if :: phase[r] == OPEN && load[r] != BROKEN -> computed[r] = END(host_node[r]) :: else -> skip fi;
#endif
  release_host(r);
  if :: phase[r] == ABANDONED -> free_private(r) :: else -> skip fi
}
#ifdef BUG_LOAD_SETTLED_EARLY
#define LOAD_ENDED(r) (load[r] != 0)
#else
#define LOAD_ENDED(r) (load[r] >= DONE)
#endif
#endif

inline end_lease(r) { /* Lease::abort, and finish() after publish() */
#ifdef LOADS
#ifdef BUG_FREED_WHILE_LOADED
  if
  :: load[r] -> /* the copy goes on in pages that are no longer the lease's */
     j = OWNED(r);
     i = 0;
     do
     :: i < size[r] ->
        if :: i >= j -> release(DEVICE, table[T(r, i)], PRIVATE) :: else -> skip fi;
        i++
     :: else -> break
     od;
     phase[r] = ABANDONED
  :: else -> release_host(r); free_private(r)
  fi
#else
  if
  :: load[r] -> phase[r] = ABANDONED
  :: else -> release_host(r); free_private(r)
  fi
#endif
#else
  free_private(r)
#endif
}

/* -------------------------------------------------------------------------------------------------- backups */

#if BACKUPS
#define B(b, k) ((b) * 5 + (k))

byte backup[2]; /* the ticket of its copy */
bool above[2];  /* it waits for the other one, which has its parents */
bool held[10];  /* nodes that it copies, as B(b, k): locked on both tiers */
byte from[10];  /* device pages left to copy, by key */
byte into[10];  /* host pages to copy them to */

#define NEW_BACKUP (backup[0] != 0)
#if BACKUPS == 2
#define FREE_SLOT (backup[0] == 0 || backup[1] == 0)
#else
#define FREE_SLOT (backup[0] == 0)
#endif
#define LEFT(b, k) from[B(b, k)]
#define ANY_LEFT(b) (LEFT(b, 1) || LEFT(b, 2) || LEFT(b, 3) || LEFT(b, 4))

/* Backups._hold: pages on the way to k that the host lacks; all of them on the device. */
#define LACKS(k) (first[k] && cells[C(DEVICE, k)] == PRESENT && cells[C(HOST, k)] == ABSENT)

inline count_lacking(k) { /* kept: pages; the host has a connected prefix, so these are the last nodes of the path */
  n = k; kept = 0;
  do
  :: n && cells[C(HOST, n)] == ABSENT -> kept = kept + END(n) - END(first[n]) + 1; n = UP(first[n])
  :: else -> break
  od;
  skip
}

inline begin_backup(b, k) { /* Backups.begin */
  count_lacking(k);
  if
  :: kept <= unused[HOST] ->
     at = k;
     do
     :: at && cells[C(HOST, at)] == ABSENT ->
        held[B(b, at)] = true;
#ifndef BUG_DEVICE_NOT_LOCKED
        lock(DEVICE, at);
#endif
        lock(HOST, at);
        cells[C(HOST, at)] = IN_FLIGHT; /* Tree::attach */
        transfer[at] = at;
        lock_path(HOST, at, 0);
        e = at;
        do
        :: allocate(HOST, e, ids[C(HOST, e)]);
           into[B(b, e)] = ids[C(HOST, e)];
           from[B(b, e)] = ids[C(DEVICE, e)];
           if :: e == first[at] -> break :: else -> e = UP(e) fi
        od;
        at = UP(first[at])
     :: else -> break
     od;
#ifndef BUG_PARENT_NOT_WAITED_FOR
     do /* Tree::in_flight_above */
     :: at && cells[C(HOST, at)] == PRESENT -> at = UP(first[at])
     :: else -> break
     od;
     above[b] = (at != 0);
#endif
     backup[b] = RUNNING
  :: else -> skip
  fi
}

inline copy_down(b) { /* one page, in any order: the lowest key first is as good as another */
  if
  :: LEFT(b, 1) -> e = 1
  :: !LEFT(b, 1) && LEFT(b, 2) -> e = 2
  :: !LEFT(b, 1) && !LEFT(b, 2) && LEFT(b, 3) -> e = 3
  :: else -> e = 4
  fi;
  assert(owner[P(DEVICE, from[B(b, e)])] == CACHED);
  assert(owner[P(HOST, into[B(b, e)])] == PRIVATE);
  kv[P(HOST, into[B(b, e)])] = kv[P(DEVICE, from[B(b, e)])];
  from[B(b, e)] = 0;
  if :: !ANY_LEFT(b) -> backup[b] = DONE :: else -> skip fi
}

inline end_transfer(k) { /* Tree::commit */
  at = k;
  do
  :: at && transfer[at] == k -> 
     e = at;
     do
     :: hand_over(HOST, ids[C(HOST, e)]);
        if :: e == first[at] -> break :: else -> e = UP(e) fi
     od;
     cells[C(HOST, at)] = PRESENT;
     transfer[at] = 0;
     at = UP(first[at])
  :: else -> break
  od;
  unlock_path(HOST, k);
  join(k)
}

inline cancel_transfer(k) { /* Tree::cancel: refused while something below has host pages */
  assert(!HOLDERS(HOST, k));
  at = k;
  do
  :: at && transfer[at] == k ->
     vacate(HOST, at, PRIVATE);
     transfer[at] = 0;
     at = UP(first[at])
  :: else -> break
  od;
  unlock_path(HOST, k);
  reap(k)
}

inline release_backup(b) { /* Backups._release */
  k_ = 1;
  do
  :: k_ <= 4 ->
     if
     :: held[B(b, k_)] ->
        held[B(b, k_)] = false;
#ifndef BUG_DEVICE_NOT_LOCKED
        unlock(DEVICE, k_);
#endif
        if :: first[k_] -> unlock(HOST, k_) :: else -> assert(false) fi
     :: else -> skip
     fi;
     from[B(b, k_)] = 0;
     into[B(b, k_)] = 0;
     k_++
  :: else -> break
  od;
  backup[b] = 0;
  above[b] = false
}

inline cancel_backup(b) { /* Backups._cancel, from the last node up */
  k_ = 4;
  do
  :: k_ -> if :: held[B(b, k_)] -> cancel_transfer(k_) :: else -> skip fi; k_--
  :: else -> break
  od;
  release_backup(b)
}

#ifdef BUG_BACKUP_SETTLED_EARLY
#define COPIED(b) (backup[b] && backup[b] <= BROKEN)
#else
#define COPIED(b) (backup[b] == DONE || backup[b] == BROKEN)
#endif
#define VOTES(b) (COPIED(b) && (!above[b] || backup[1 - (b)] == CANCELLED))
#ifdef BUG_FAILED_COPY_ARRIVED
#define FAILED(b) (above[b])
#else
#define FAILED(b) (above[b] || backup[b] == BROKEN)
#endif

inline end_backup(b) { /* Backups.end */
  if
  :: FAILED(b) ->
#ifdef BUG_UNDONE_BEFORE_THOSE_BELOW
     if
     :: above[b] -> cancel_backup(b); backup[1 - (b)] = 0
     :: else -> cancel_backup(b)
     fi
#else
     if
     :: above[1 - (b)] -> backup[b] = CANCELLED
     :: !above[1 - (b)] && above[b] -> cancel_backup(b); cancel_backup((1 - (b)))
     :: else -> cancel_backup(b)
     fi
#endif
  :: else ->
     k_ = 1;
     do
     :: k_ <= 4 -> if :: held[B(b, k_)] -> end_transfer(k_) :: else -> skip fi; k_++
     :: else -> break
     od;
     above[1 - (b)] = false;
     release_backup(b)
  fi
}
#endif

/* -------------------------------------------------------------------------------------------------- prefetch */

#ifdef PREFETCH
/* One prefetch, of prompt `aim`. It reads pages into private host pages, two at a time, which arrive in any order, and
   adds them to the tree in order, after its attach point. */
#define READING 1
#define INTACT 2
#define DAMAGED 3

byte prefetch;  /* 0: none; 1: reads; 2: begins no more reads */
byte aim;
byte anchor;    /* locked on the host; 0: before the first page */
byte reads[2];  /* the pages after the anchor */
byte target[2]; /* their host pages */

#define NEW_READ (reads[0] != 0)
#define NEXT_PAGE (END(anchor) + (reads[0] != 0) + (reads[1] != 0))

inline begin_prefetch(r) {
  match(r); /* AttachPoint._locate splits there, too */
  if
  :: END(low) < N -> aim = r; anchor = low; lock(HOST, low); prefetch = 1
  :: else -> skip
  fi
}

inline begin_read() {
  j = NEW_READ;
  allocate(HOST, AT(aim, NEXT_PAGE), target[j]);
  reads[j] = READING
}

inline arrive(a, how) { /* what is damaged has no KV that is of use */
  reads[a] = how;
#ifdef BUG_KEYS_OF_THE_FIRST_BATCH
  if :: how == INTACT -> kv[P(HOST, target[a])] = AT(aim, END(anchor)) :: else -> skip fi
#else
  if :: how == INTACT -> kv[P(HOST, target[a])] = AT(aim, END(anchor) + (a)) :: else -> skip fi
#endif
}

#ifdef BUG_VERIFICATION_IGNORED
#define GOOD(a) (reads[a] == INTACT || reads[a] == DAMAGED)
#else
#define GOOD(a) (reads[a] == INTACT)
#endif

inline take_first() { /* the next read is the first now */
  reads[0] = reads[1];
  target[0] = target[1];
  reads[1] = 0;
  target[1] = 0
}

inline place() { /* Prefetch._arrived, AttachPoint.place */
#ifdef BUG_ORDER_OF_ARRIVAL
  if
  :: reads[0] < INTACT -> /* the second came first */
     i = reads[0]; reads[0] = reads[1]; reads[1] = i;
     i = target[0]; target[0] = target[1]; target[1] = i
  :: else -> skip
  fi;
#endif
  id = target[0];
  if
  :: prefetch == 1 && GOOD(0) && !(anchor && cells[C(HOST, anchor)] != PRESENT) ->
     want = END(anchor);
     mine[want] = id;
     insert(HOST, aim, anchor, want, want + 1);
     kept = (until > want);
     if
     :: kept && existing <= want -> hand_over(HOST, id)
#ifdef BUG_DUPLICATE_LOST
     :: else -> skip
#else
#ifdef BUG_DUPLICATE_IS_THE_TREES
     :: else -> hand_over(HOST, id)
#else
     :: else ->
        release(HOST, id, PRIVATE);
#ifdef BUG_DUPLICATE_FREED_TWICE
        release(HOST, id, PRIVATE);
#endif
#endif
#endif
     fi;
     if
     :: kept ->
        at = anchor;
        anchor = k_;
        take_first();
        lock(HOST, anchor);
        unlock(HOST, at)
     :: else -> take_first(); prefetch = 2
     fi
#ifdef BUG_PAGES_AFTER_A_MISS
  :: prefetch == 1 && !GOOD(0) -> /* the next one takes its place */
     release(HOST, id, PRIVATE);
     take_first()
#endif
  :: else ->
     release(HOST, id, PRIVATE);
     take_first();
     prefetch = 2
  fi
}

inline end_prefetch() {
  at = anchor;
  prefetch = 0; anchor = 0; aim = 0;
  unlock(HOST, at)
}
#ifdef BUG_ORDER_OF_ARRIVAL
#define ARRIVED (reads[0] >= INTACT || reads[1] >= INTACT)
#else
#define ARRIVED (reads[0] >= INTACT)
#endif
#endif

/* -------------------------------------------------------------------------------------------------- writes, pins */

#ifdef WRITES
byte write;   /* the node whose last page is written to storage, locked on the host; 0: none */
byte written; /* the host page that is read for it */

inline begin_write(k) { /* Writes._queue, _begin_pages */
  write = k;
  written = ids[C(HOST, k)];
#ifndef BUG_WRITTEN_UNLOCKED
  lock(HOST, k)
#endif
}

inline end_write() { /* storage has it under the name of its key */
  assert(owner[P(HOST, written)] == CACHED && kv[P(HOST, written)] == write);
  at = write;
  write = 0;
  written = 0;
#ifndef BUG_WRITTEN_UNLOCKED
  unlock(HOST, at)
#endif
}
#endif

#ifdef PINS
byte pinned; /* the node that a retention locks on the device */
#endif

/* -------------------------------------------------------------------------------------------------- check */

#define IMPLIES(a, b) (!(a) || (b))
#define SPAN(m, k) (first[m] && first[m] <= (k) && ((k) == (m) || ((k) < 3 && (k) < (m)))) /* node m has key k */
#define NODE(k) (SPAN(1, k) + SPAN(2, k) * 2 + SPAN(3, k) * 3 + SPAN(4, k) * 4)
#define NODES(k) (SPAN(1, k) + SPAN(2, k) + SPAN(3, k) + SPAN(4, k))

#ifdef LOADS
#define HOST_LEASES(k) ((host_node[0] == (k)) + (host_node[1] == (k)))
#else
#define HOST_LEASES(k) 0
#endif
#if BACKUPS
#define HELD(k) (held[B(0, k)] + held[B(1, k)])
#else
#define HELD(k) 0
#endif
#ifdef BUG_DEVICE_NOT_LOCKED
#define HELD_DEVICE(k) 0
#else
#define HELD_DEVICE(k) HELD(k)
#endif
#ifdef PREFETCH
#define ANCHORED(k) (prefetch && anchor == (k))
#define READ_INTO(p) ((target[0] == (p)) + (target[1] == (p)))
#else
#define ANCHORED(k) 0
#define READ_INTO(p) 0
#endif
#if defined(WRITES) && !defined(BUG_WRITTEN_UNLOCKED)
#define WRITTEN(k) (write == (k))
#else
#define WRITTEN(k) 0
#endif
#ifdef PINS
#define PINNED(k) (pinned == (k))
#else
#define PINNED(k) 0
#endif

/* Who holds a node: what check() counts as pins. Nobody at the end: then nothing is locked. */
#define HOLD_DEVICE(k) ((node[0] == (k)) + (node[1] == (k)) + HELD_DEVICE(k) + PINNED(k))
#define HOLD_HOST(k) (HOST_LEASES(k) + HELD(k) + ANCHORED(k) + WRITTEN(k))

#define BELOW(m, k) (first[m] && ((m) == (k) || (k) < 3 && (k) < (m))) /* the path of node m has key k */
#define OWN_LOCKS(t, m) (pins[C(t, m)] + ((t) == HOST && transfer[m] == (m)))
#define LOCKS(t, k) (BELOW(1, k) * OWN_LOCKS(t, 1) + BELOW(2, k) * OWN_LOCKS(t, 2) + \
                     BELOW(3, k) * OWN_LOCKS(t, 3) + BELOW(4, k) * OWN_LOCKS(t, 4))

inline check_node(k) { /* Structure::check_node, Residency::check_node, check_locks */
  assert(UP(first[k]) == 0 || first[UP(first[k])]);                        /* a node begins where its parent ends */
  assert(!DEAD(k));                                                        /* it has a cell, a child or a lock */
  assert(pins[C(DEVICE, k)] == HOLD_DEVICE(k) && pins[C(HOST, k)] == HOLD_HOST(k));
  assert(locks[C(DEVICE, k)] == LOCKS(DEVICE, k) && locks[C(HOST, k)] == LOCKS(HOST, k)); /* locks add up */
  assert(cells[C(DEVICE, k)] != IN_FLIGHT);
  assert((cells[C(HOST, k)] == IN_FLIGHT) == (transfer[k] != 0));
  assert(IMPLIES(transfer[k], first[transfer[k]] && transfer[transfer[k]] == transfer[k])); /* it names its transfer */
  assert(IMPLIES(cells[C(DEVICE, k)] == ABSENT, !HOLDERS(DEVICE, k)));     /* a child holds a cell only if its parent */
  assert(IMPLIES(cells[C(HOST, k)] == ABSENT, !HOLDERS(HOST, k)))
}

inline check_key(t, k) { /* a cell has an id for each page, or none; a page in the tree has the KV of its tokens */
  m = NODE(k);
  assert((ids[C(t, k)] != 0) == (m && cells[C(t, m)] != ABSENT));
  assert(IMPLIES(m && cells[C(t, m)] == PRESENT, owner[P(t, ids[C(t, k)])] == CACHED && kv[P(t, ids[C(t, k)])] == k));
  assert(IMPLIES(m && cells[C(t, m)] == IN_FLIGHT, owner[P(t, ids[C(t, k)])] == PRIVATE))
}

#define IN_TREE(t, p) ((ids[C(t, 1)] == (p)) + (ids[C(t, 2)] == (p)) + (ids[C(t, 3)] == (p)) + (ids[C(t, 4)] == (p)))
#define HAS(r, i, p) ((i) >= OWNED(r) && table[T(r, i)] == (p))
#define IN_TABLES(p) (HAS(0, 0, p) + HAS(0, 1, p) + HAS(0, 2, p) + HAS(1, 0, p) + HAS(1, 1, p) + HAS(1, 2, p))

inline check_page(t, p) { /* a page is owned once; private pages are never found; free and used are all there are */
  if
  :: t == DEVICE ->
     assert(IN_TREE(t, p) == (owner[P(t, p)] == CACHED));
     assert(IN_TABLES(p) == (owner[P(t, p)] == PRIVATE))
  :: else -> /* a page being backed up to is private, and in flight on its node */
     assert(IN_TREE(t, p) + READ_INTO(p) == (owner[P(t, p)] != FREE));
     assert(IMPLIES(READ_INTO(p), owner[P(t, p)] == PRIVATE))
  fi;
  id = id + (owner[P(t, p)] == FREE)
}

inline check_lease(r) { /* what a request reads next is cached or its own, and computed */
  i = 0;
  do
  :: i < computed[r] ->
     assert(kv[P(DEVICE, table[T(r, i)])] == AT(r, i));
     assert(IMPLIES(i < OWNED(r), table[T(r, i)] == ids[C(DEVICE, AT(r, i))]));
     i++
  :: else -> break
  od;
  assert(IMPLIES(node[r], first[node[r]]))
}

inline check() {
  k_ = 1;
  do
  :: k_ <= 4 ->
     assert(NODES(k_) <= 1); /* siblings never share their first page */
     if :: first[k_] -> check_node(k_) :: else -> skip fi;
     check_key(DEVICE, k_);
     check_key(HOST, k_);
     k_++
  :: else -> break
  od;
  id = 0; e = 1;
  do :: e <= DEVICE_PAGES -> check_page(DEVICE, e); e++ :: else -> break od;
  assert(id == unused[DEVICE]);
  id = 0; e = 1;
  do :: e <= HOST_PAGES -> check_page(HOST, e); e++ :: else -> break od;
  assert(id == unused[HOST]);
  check_lease(0);
  check_lease(1)
}

/* -------------------------------------------------------------------------------------------------- what happens */

#define ROOM(r) (unused[DEVICE] >= END(host_node[r]) - size[r])
#define STEADY(r) (phase[r] == OPEN && !LOADING(r))

#define REQUEST(r) \
  :: d_step { phase[r] == 0 && !LOADING(r) -> lease(r); skip } \
  :: d_step { STEADY(r) && size[r] < N && unused[DEVICE] -> reserve(r); skip } \
  :: d_step { STEADY(r) && computed[r] < size[r] -> compute(r); skip } \
  :: d_step { STEADY(r) && OWNED(r) < computed[r] -> publish(r); skip } \
  :: d_step { phase[r] == OPEN -> end_lease(r); skip }

#define LOAD(r) \
  :: d_step { STEADY(r) && fresh[r] && ROOM(r) -> begin_load(r); skip } \
  :: d_step { load[r] == RUNNING -> copy_up(r); skip } \
  :: d_step { load[r] == RUNNING -> load[r] = BROKEN; skip } \
  :: d_step { LOAD_ENDED(r) -> end_load(r); skip }

#define EVICT(t, k) \
  :: d_step { CANDIDATE(t, k) -> evict_one(t, k, true); skip } \
  :: d_step { CANDIDATE(t, k) && first[k] != (k) -> evict_one(t, k, false); skip }

#define BACK_UP(k) \
  :: d_step { FREE_SLOT && LACKS(k) -> j = NEW_BACKUP; begin_backup(j, k); skip }

#define BACKUP(b) \
  :: d_step { backup[b] == RUNNING -> copy_down(b); skip } \
  :: d_step { backup[b] == RUNNING -> backup[b] = BROKEN; skip } \
  :: d_step { VOTES(b) -> end_backup(b); skip }

#define READ(a) \
  :: d_step { reads[a] == READING -> arrive(a, INTACT); skip } \
  :: d_step { reads[a] == READING -> arrive(a, DAMAGED); skip }

#define PREFETCHES \
  :: d_step { !prefetch -> begin_prefetch(0); skip } \
  :: d_step { !prefetch -> begin_prefetch(1); skip } \
  :: d_step { prefetch == 1 && !reads[1] && NEXT_PAGE < N && unused[HOST] -> begin_read(); skip } \
  READ(0) READ(1) \
  :: d_step { ARRIVED && !(anchor && cells[C(HOST, anchor)] == IN_FLIGHT) -> place(); skip } \
  :: d_step { prefetch && !reads[0] -> end_prefetch(); skip }

#define WRITE(k) \
  :: d_step { !write && first[k] && cells[C(HOST, k)] == PRESENT -> begin_write(k); skip }

#define PIN(k) \
  :: d_step { !pinned && first[k] && cells[C(DEVICE, k)] == PRESENT -> pinned = k; lock(DEVICE, k); skip }

active proctype world() {
  d_step {
    unused[DEVICE] = DEVICE_PAGES;
    unused[HOST] = HOST_PAGES
  };
  do
  :: atomic {
       if
       REQUEST(0)
#if REQUESTS == 2
       REQUEST(1)
#endif
       EVICT(DEVICE, 1) EVICT(DEVICE, 2) EVICT(DEVICE, 3) EVICT(DEVICE, 4)
#ifdef LOADS
       LOAD(0)
#if REQUESTS == 2
       LOAD(1)
#endif
#endif
#if BACKUPS
       EVICT(HOST, 1) EVICT(HOST, 2) EVICT(HOST, 3) EVICT(HOST, 4)
       BACK_UP(1) BACK_UP(2) BACK_UP(3) BACK_UP(4)
       BACKUP(0)
#endif
#if BACKUPS == 2
       BACKUP(1)
#endif
#ifdef PREFETCH
       PREFETCHES
#endif
#ifdef WRITES
       WRITE(1) WRITE(2) WRITE(3) WRITE(4)
       :: d_step { write -> end_write(); skip }
#endif
#ifdef PINS
       PIN(1) PIN(2) PIN(3) PIN(4)
       :: d_step { pinned -> at = pinned; pinned = 0; unlock(DEVICE, at); skip }
#endif
       fi;
       d_step { check(); skip }
     }
  od
}
