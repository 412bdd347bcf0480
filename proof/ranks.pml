/* Two ranks that must decide alike: each has its own copies, which end in another order and with another outcome.

   Each is a process, as in `runtime/parallel/ranks.py`: rank 0 shares what is done next, and both agree on the lowest votes
   before they settle what is under way (`tiers/pending.py`). Whatever they do with an outcome of their own, instead of
   the one that they agreed on, makes them differ, or wait for each other for ever.

   -DBUG_... reintroduces a bug of `simulator/bugs.py`. */

#ifndef ITEMS
#define ITEMS 3 /* under way at once */
#endif
#define DEPTH 2 /* pages of the prompt */

/* what is under way */
#define BACKUP 1
#define LOOKUP 2
#define READ 3
#define WRITE 4

/* votes: 0 until it has ended */
#define FAILED 1
#define ARRIVED 2

/* what rank 0 shares */
#define POLL 1
#define BACK_UP 2
#define PREFETCH 3
#define EVICT 4

#define I(me, i) ((me) * ITEMS + (i))

byte kind[2 * ITEMS];  /* PendingList: in the order in which they began */
byte vote[2 * ITEMS];
byte items[2];
byte pages[2];         /* of the prompt on the host, from the first */
byte aim[2];           /* the end that the prefetch reads to; 0: none is under way */

chan commands = [0] of { byte };
chan votes = [0] of { byte, byte, byte, byte };  /* how many, and three of them */
chan agreed = [0] of { byte, byte, byte };

inline add(me, what) { /* PendingList.add */
  assert(items[me] < ITEMS);
  kind[I(me, items[me])] = what;
  vote[I(me, items[me])] = 0;
  items[me]++
}

inline drop_first_ended(me) { /* takes the first item with a vote in `low` off the list, of those before `asked` */
  i = at;
  do
  :: i + 1 < items[me] ->
     kind[I(me, i)] = kind[I(me, i + 1)];
     vote[I(me, i)] = vote[I(me, i + 1)];
     low[i] = low[i + 1];
     i++
  :: else -> break
  od;
  kind[I(me, i)] = 0;
  vote[I(me, i)] = 0;
  low[i] = 0;
  items[me]--
}

inline settle_one(me, what, own, outcome) { /* what an item does with the outcome that all ranks agreed on */
  if
  :: what == BACKUP ->
     if :: outcome == ARRIVED && pages[me] < DEPTH -> pages[me]++; add(me, WRITE) :: else -> skip fi
  :: what == WRITE -> /* Writes._end: where storage has a gap, the whole path is queued again */
#ifdef BUG_OWN_GAP
     if :: own == FAILED -> add(me, WRITE) :: else -> skip fi
#else
     if :: outcome == FAILED -> add(me, WRITE) :: else -> skip fi
#endif
  :: what == LOOKUP -> /* Prefetch._found: it votes 1 + the end that it offers */
#ifdef BUG_OWN_LOOKUP
     aim[me] = own - 1;
#else
     aim[me] = outcome - 1;
#endif
     if :: aim[me] > pages[me] -> add(me, READ) :: else -> aim[me] = 0 fi
  :: else -> /* Prefetch._arrived: it votes 2 + the pages that are intact, or 1 */
     if
     :: outcome > ARRIVED && pages[me] < aim[me] -> pages[me]++
     :: else -> skip
     fi;
     aim[me] = 0
  fi
}

/* One collective call: the votes of each item, and the lowest of them on every rank. */
inline agree(me) {
  if
  :: me == 1 ->
     votes!items[1], vote[I(1, 0)], vote[I(1, 1)], vote[I(1, 2)];
     agreed?low[0], low[1], low[2]
  :: else ->
     votes?count, low[0], low[1], low[2];
     d_step {
       assert(count == items[0]);
       i = 0;
       do
       :: i < ITEMS -> if :: vote[I(0, i)] < low[i] -> low[i] = vote[I(0, i)] :: else -> skip fi; i++
       :: else -> break
       od;
       skip
     };
     agreed!low[0], low[1], low[2]
  fi
}

inline settle(me) { /* PendingList.settle: again until nothing has ended. What that begins is not settled yet */
  asked = items[me];
  do
  :: asked ->
     agree(me);
#ifdef BUG_OWN_VOTES
     d_step {
       i = 0;
       do :: i < ITEMS -> low[i] = vote[I(me, i)]; i++ :: else -> break od;
       skip
     };
#endif
     d_step {
       ended = 0;
       at = 0;
       do
       :: at < asked ->
          if
          :: low[at] ->
             what = kind[I(me, at)];
             own = vote[I(me, at)];
             outcome = low[at];
             drop_first_ended(me);
             asked--;
             ended = 1;
             settle_one(me, what, own, outcome)
          :: else -> at++
          fi
       :: else -> break
       od;
       i = 0; at = 0; what = 0; own = 0; outcome = 0; low[0] = 0; low[1] = 0; low[2] = 0
     };
     if :: ended -> ended = 0 :: else -> break fi
  :: else -> break
  od;
  asked = 0
}

#define ROOM (items[0] + 1 < ITEMS) /* what settles may begin one more */
#define SAME (items[0] == items[1] && pages[0] == pages[1] && aim[0] == aim[1] && kind[0] == kind[I(1, 0)] && \
              kind[1] == kind[I(1, 1)] && kind[2] == kind[I(1, 2)])

inline obey(me) {
  if
  :: command == POLL -> settle(me)
  :: command == BACK_UP -> add(me, BACKUP)
  :: command == PREFETCH -> aim[me] = DEPTH; add(me, LOOKUP)
  :: command == EVICT -> pages[me]--
  fi
}

proctype rank(bool me) {
  byte command, i, at, asked, ended, what, own, outcome, count;
  byte low[ITEMS];
end:
  do
  :: me == 0 ->
     if
     :: items[0] -> command = POLL
     :: ROOM -> command = BACK_UP
     :: ROOM && !aim[0] -> command = PREFETCH
     :: pages[0] && !aim[0] -> command = EVICT
     fi;
     commands!command;
     obey(me);
     command = 0;
     count = 0
  :: me == 1 ->
     atomic { commands?command; assert(SAME) };
     obey(me);
     command = 0
  od
}

/* Copies and calls to the store end in any order, on each rank for itself. */
proctype copies(bool me) {
  byte i;
end:
  do
  :: atomic {
       if
       :: items[me] > 0 && !vote[I(me, 0)] -> i = 0
       :: items[me] > 1 && !vote[I(me, 1)] -> i = 1
       :: items[me] > 2 && !vote[I(me, 2)] -> i = 2
       fi;
       if
       :: vote[I(me, i)] = FAILED
       :: vote[I(me, i)] = ARRIVED
       :: kind[I(me, i)] == READ || kind[I(me, i)] == LOOKUP -> vote[I(me, i)] = ARRIVED + 1
       fi;
       i = 0
     }
  od
}

init {
  atomic { run rank(0); run rank(1); run copies(0); run copies(1) }
}
