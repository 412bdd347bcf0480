/* The tree, its pools and check(), for `cache.pml`: the pages of two prompts, which part after their second page.

     1 -- 2 -- 3      prompt 0: pages 1, 2, 3
           \-- 4      prompt 1: pages 1, 2, 4

   A page is named by its key, and its KV is right if that key was computed into it. A node is a run of keys, and its
   handle is its last key: it goes stale when the node's end moves, as in the code. The tree is used by one thread, so
   each operation is one step. What may happen between two of them is a copy: it is made page by page.

   What a policy decides (the victim, how much of it goes) is left open, so that every order of eviction is covered. */

#ifndef DEVICE_PAGES
#define DEVICE_PAGES 4
#endif
#ifndef HOST_PAGES
#define HOST_PAGES 3
#endif

#define DEVICE 0
#define HOST 1
#define N 3 /* pages of a prompt */

#define UP(k) ((k) - 1 - ((k) == 4))                      /* the key before */
#define NEXT(m, k) (((m) == 1) * 2 + ((m) != 1) * (k))    /* the key after m, on the way to k */
#define END(k) ((k) - ((k) == 4))                         /* pages up to the end of k */
#define AT(r, i) ((i) + 1 + ((r) && (i) == 2))            /* the key of page i of prompt r */
#define MEETS(r, k) ((k) - ((k) > 2 && (k) != 3 + (r)) * ((k) - 2)) /* the last of a node's keys in prompt r */

#define ABSENT 0
#define PRESENT 1
#define IN_FLIGHT 2

#define FREE 0
#define CACHED 1
#define PRIVATE 2

#define C(t, k) ((t) * 5 + (k))                    /* a cell */
#define PAGES(t) (((t) == DEVICE) * DEVICE_PAGES + ((t) == HOST) * HOST_PAGES)
#define P(t, p) ((t) * (DEVICE_PAGES + 1) + (p))   /* a page; 0 is none */

byte first[5];  /* the first key of the node that ends at a key; 0: no node ends there */
byte cells[10]; /* by node */
byte locks[10];
byte pins[10];  /* locks that end at this node */
byte ids[10];   /* the page of each key */
byte transfer[5]; /* by node: the node that its transfer to the host is named after */
byte owner[DEVICE_PAGES + HOST_PAGES + 2];
byte kv[DEVICE_PAGES + HOST_PAGES + 2]; /* the key that was computed into a page; 0: none */
byte unused[2];

hidden byte n, m, e, k_, at, low, high, i, j, id, kept, existing, until, want, grown, blocked;
hidden byte mine[3]; /* ids for an insertion, by page of the prompt */

/* -------------------------------------------------------------------------------------------------- the pools */

/* Ids are interchangeable, so which free one is taken does not matter. A key's own keeps the number of states low. */
inline allocate(t, k, out) {
  if
  :: k <= PAGES(t) && owner[P(t, k)] == FREE -> id = k
  :: else -> id = 1; do :: owner[P(t, id)] == FREE -> break :: else -> id++ od
  fi;
  owner[P(t, id)] = PRIVATE;
  unused[t]--;
  out = id
}

inline release(t, p, from) { /* from -> free */
  assert(owner[P(t, p)] == from);
  owner[P(t, p)] = FREE;
  kv[P(t, p)] = 0;
  unused[t]++
}

inline hand_over(t, p) { /* private -> cached */
  assert(owner[P(t, p)] == PRIVATE);
  owner[P(t, p)] = CACHED
}

/* -------------------------------------------------------------------------------------------------- nodes */

#define CHILD(m, k) (first[m] && UP(first[m]) == (k))
#define CHILDREN(k) (CHILD(1, k) + CHILD(2, k) + CHILD(3, k) + CHILD(4, k))
#define HOLDS(t, m, k) (CHILD(m, k) && cells[C(t, m)] != ABSENT)
#define HOLDERS(t, k) (HOLDS(t, 1, k) + HOLDS(t, 2, k) + HOLDS(t, 3, k) + HOLDS(t, 4, k))
#define DEAD(k) (!CHILDREN(k) && !pins[C(DEVICE, k)] && !pins[C(HOST, k)] && \
                 cells[C(DEVICE, k)] == ABSENT && cells[C(HOST, k)] == ABSENT)

/* TreeShape::split: the upper half ends at `upper`, the lower half keeps its handle. */
inline split(upper, lower) {
  first[upper] = first[lower];
  first[lower] = NEXT(upper, lower);
  cells[C(DEVICE, upper)] = cells[C(DEVICE, lower)];
  cells[C(HOST, upper)] = cells[C(HOST, lower)];
#ifndef BUG_SPLIT_UNLOCKED
  locks[C(DEVICE, upper)] = locks[C(DEVICE, lower)];
  locks[C(HOST, upper)] = locks[C(HOST, lower)];
#endif
  pins[C(DEVICE, upper)] = 0;
  pins[C(HOST, upper)] = 0;
  transfer[upper] = transfer[lower];
#ifdef BUG_SPLIT_LEAVES_TRANSFER
  transfer[upper] = 0;
  if :: cells[C(HOST, upper)] == IN_FLIGHT -> cells[C(HOST, upper)] = PRESENT :: else fi;
#endif
#ifdef BUG_SPLIT_LEAVES_HOST
  cells[C(HOST, upper)] = ABSENT
#else
  skip
#endif
}

/* TreeShape::split_at: makes a node end at a key that the tree has. */
inline split_at(k) {
  if
  :: first[k] -> skip
  :: else ->
     if
     :: first[2] && first[2] <= k && k < 2 -> split(k, 2)
     :: else ->
        if
        :: first[3] && first[3] <= k && k < 3 -> split(k, 3)
        :: else -> assert(first[4] && first[4] <= k && k < 4); split(k, 4)
        fi
     fi
  fi
}

/* TreeShape::join: a node absorbs its parent, if nobody can tell. */
#define ALIKE(t, u, k) (!pins[C(t, u)] && cells[C(t, u)] != IN_FLIGHT && cells[C(t, u)] == cells[C(t, k)] && \
                        locks[C(t, u)] == locks[C(t, k)])
inline join(k) {
  n = UP(first[k]);
  if
  :: n && CHILDREN(n) == 1 && ALIKE(DEVICE, n, k) && ALIKE(HOST, n, k) ->
     first[k] = first[n];
     forget(n)
  :: else -> skip
  fi
}

inline forget(k) {
  first[k] = 0;
  cells[C(DEVICE, k)] = ABSENT;
  cells[C(HOST, k)] = ABSENT;
  locks[C(DEVICE, k)] = 0;
  locks[C(HOST, k)] = 0;
  transfer[k] = 0
}

inline release_boundary(k) {
  if
  :: CHILDREN(k) == 1 ->
     if
     :: CHILD(1, k) -> join(1)
     :: CHILD(2, k) -> join(2)
     :: CHILD(3, k) -> join(3)
     :: CHILD(4, k) -> join(4)
     fi
  :: else -> skip
  fi
}

inline reap(k) {
  n = k;
  do
  :: n && DEAD(n) ->
     assert(!locks[C(DEVICE, n)] && !locks[C(HOST, n)]);
     m = UP(first[n]);
     forget(n);
     n = m
  :: else -> break
  od;
  skip
}

inline settle_node(k) { /* after a lock or a cell is gone */
  if
  :: DEAD(k) -> reap(k)
  :: else -> release_boundary(k)
  fi
}

/* -------------------------------------------------------------------------------------------------- locks */

inline lock_path(t, k, top) { /* the nodes from k up to `top`, without it */
  n = k;
  do
  :: n != (top) -> locks[C(t, n)]++; n = UP(first[n])
  :: else -> break
  od;
  skip
}

inline unlock_path(t, k) {
  n = k;
  do
  :: n -> assert(locks[C(t, n)]); locks[C(t, n)]--; n = UP(first[n])
  :: else -> break
  od;
  skip
}

inline lock(t, k) {
  if :: k -> assert(first[k]); lock_path(t, k, 0); pins[C(t, k)]++ :: else -> skip fi
}

inline unlock(t, k) {
  if
  :: k ->
     assert(first[k] && pins[C(t, k)]);
     pins[C(t, k)]--;
     unlock_path(t, k);
     settle_node(k)
  :: else -> skip
  fi
}

inline move_lock(t, from, to) {
  if
  :: from == to -> skip
  :: from != to && from == 0 -> lock(t, to)
  :: else ->
     assert(first[from] && pins[C(t, from)]);
     lock_path(t, to, from);
     pins[C(t, to)]++;
     pins[C(t, from)]--;
     release_boundary(from)
  fi
}

/* -------------------------------------------------------------------------------------------------- match, insert */

inline find(k) { /* m: the node whose first key is k */
  if
  :: first[1] == k -> m = 1
  :: first[2] == k -> m = 2
  :: first[3] == k -> m = 3
  :: first[4] == k -> m = 4
  :: else -> m = 0
  fi
}

/* Tree::match: high is the last key of a prompt on the device, low that on device or host. Splits nodes there. */
inline match(r) {
  high = 0; low = 0; at = 0;
  do
  :: at == N -> break
  :: else ->
     find(AT(r, at));
     if
     :: m && cells[C(DEVICE, m)] == PRESENT && high == low -> high = MEETS(r, m); low = high
     :: m && cells[C(HOST, m)] == PRESENT && !(cells[C(DEVICE, m)] == PRESENT && high == low) -> low = MEETS(r, m)
     :: else -> break
     fi;
     if :: MEETS(r, m) != m -> break :: else -> at = END(m) fi
  od;
  if :: low -> split_at(low) :: else -> skip fi;
  if :: high -> split_at(high) :: else -> skip fi
}

inline fill(t, k) { /* a node's absent cell gets the caller's ids; they begin with page `from` */
  cells[C(t, k)] = PRESENT;
  e = k;
  do
  :: ids[C(t, e)] = mine[END(e) - 1];
     if :: e == first[k] -> break :: else -> e = UP(e) fi
  od;
  skip
}

/* Tree::insert of pages [from, upto) of prompt r, whose ids are in `mine`. Afterwards pages [from, until) are in the
   tree,
   and those before `existing` were there already. The last node is k_. */
inline insert(t, r, after, from, upto) {
  k_ = after; at = from; blocked = 0; grown = 0; existing = upto;
  do
  :: at < upto && !blocked ->
     find(AT(r, at));
     if
     :: m && cells[C(t, m)] == IN_FLIGHT -> blocked = 1
     :: m && cells[C(t, m)] != IN_FLIGHT ->
        e = MEETS(r, m);
        if :: END(e) > upto -> e = AT(r, upto - 1) :: else -> skip fi;
        if :: e != m -> split(e, m) :: else -> skip fi;
        k_ = e; at = END(e);
        if
        :: cells[C(t, k_)] == ABSENT ->
           if :: existing > END(first[k_]) - 1 -> existing = END(first[k_]) - 1 :: else -> skip fi;
           fill(t, k_)
        :: else -> skip
        fi
     :: else -> break
     fi
  :: else -> break
  od;
  if
  :: at < upto && !blocked ->
     if :: existing > at -> existing = at :: else -> skip fi;
     k_ = AT(r, upto - 1);
     assert(!first[k_]);
     first[k_] = AT(r, at);
     fill(t, k_);
     at = upto;
     grown = 1
  :: else -> skip
  fi;
  until = at;
  if :: existing > until -> existing = until :: else -> skip fi;
  if :: grown -> join(k_) :: else -> skip fi
}

/* -------------------------------------------------------------------------------------------------- evict */

#ifdef BUG_EVICT_LOCKED
#define CANDIDATE(t, k) (first[k] && cells[C(t, k)] == PRESENT && !HOLDERS(t, k))
#else
#define CANDIDATE(t, k) (first[k] && cells[C(t, k)] == PRESENT && !locks[C(t, k)] && !HOLDERS(t, k))
#endif

#define ELSEWHERE(t, k) (cells[C(1 - (t), k)] != ABSENT || pins[C(1 - (t), k)])

inline vacate(t, k, from) { /* Cache::make_room, HostPages._reclaim: the ids go back to the pool */
  cells[C(t, k)] = ABSENT;
  e = k;
  do
  ::
#ifdef BUG_HOST_PAGES_LOST
     if :: t == HOST && from == CACHED -> skip :: else -> release(t, ids[C(t, e)], from) fi;
#else
     release(t, ids[C(t, e)], from);
#endif
     ids[C(t, e)] = 0;
     if :: e == first[k] -> break :: else -> e = UP(e) fi
  od;
  skip
}

/* Tree::evict_one: the last page of a leaf, or all of it. */
inline evict_one(t, k, whole) {
  if
  :: !whole && first[k] != k ->
     e = UP(k);
     if
#ifdef BUG_CUT_THOUGH_ON_HOST
     :: !CHILDREN(k) && !pins[C(t, k)] -> /* Tree::trim: its handle goes stale */
#else
     :: !CHILDREN(k) && !pins[C(t, k)] && !ELSEWHERE(t, k) -> /* Tree::trim: its handle goes stale */
#endif
        split(e, k);
        vacate(t, k, CACHED);
        forget(k)
     :: else ->
        split(e, k);
        vacate(t, k, CACHED);
        settle_node(k)
     fi
  :: else ->
     vacate(t, k, CACHED);
     settle_node(k)
  fi
}
