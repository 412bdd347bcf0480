"""Prefetches: what storage has of a prompt is copied to the host, before its request is scheduled.

    look up --deepest end n--> read | read | read ... --verified, in order--> in the tree

One lookup asks for every component of every page that could be of use, or for fewer, where each is a request. The
prefetch then aims at the deepest end from which all components can go on (`plan`), and reads what the host lacks for
that: full attention from the front, then windows, then the state. Pages are read into private host pages. Those that
arrived intact are added to the tree, at the prefetch's attach point. If one did not, the prefetch aims at the deepest
end that is left: what has arrived stays.

A prefetch serves every request that lacks the same page. How long its requests wait is decided in `waits`. One of them
may go on computing meanwhile (`lead`): from then on full attention is read from the back, until both meet
(`bidirectional`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial

from mainstem.cache.tree import Ids
from mainstem.errors import check_rules
from mainstem.tiers.pending import Polled
from mainstem.tiers.prefetch.attach_point import AttachPoint
from mainstem.tiers.prefetch.bidirectional import BidirectionalLoad
from mainstem.tiers.prefetch.missed import Cause, Missed, Shortfall
from mainstem.tiers.prefetch.plan import Plan
from mainstem.tiers.prefetch.reader import Reader
from mainstem.tiers.prefetch.reads import Read, Reads
from mainstem.tiers.prefetch.waits import ANY, Wait

_LEAST_READ = 4  # pages, where a request computes meanwhile


class Phase(Enum):
    """The phases of a prefetch.

        LOOKUP --> AGREEING --> FORWARD --> ENDED       LOOKUP     storage is asked what it has
                    ^    |       |  |         ^         AGREEING   the ranks agree on the end to aim at
                    |    |       |  v         |         FORWARD    pages are read, and join the tree, in order
                    +----|--- DRAINING -------+         DRAINING   a page was lost: what else is under way is not used
                         v       v            |         BACKWARD   a request computes from the front, while pages are
                        BACKWARD -------------+                    read from the back

    FORWARD goes back to AGREEING at once where the host has no room, and becomes BACKWARD as soon as a request leads.
    """

    LOOKUP = auto()
    AGREEING = auto()
    FORWARD = auto()
    DRAINING = auto()
    BACKWARD = auto()
    ENDED = auto()


_NEXT = {
    Phase.LOOKUP: (Phase.AGREEING,),
    Phase.AGREEING: (Phase.AGREEING, Phase.FORWARD, Phase.BACKWARD),
    Phase.FORWARD: (Phase.AGREEING, Phase.DRAINING, Phase.BACKWARD, Phase.ENDED),
    Phase.DRAINING: (Phase.AGREEING, Phase.BACKWARD, Phase.ENDED),
    Phase.BACKWARD: (Phase.ENDED,),
    Phase.ENDED: (),
}


class Prefetch:
    """A copy of a prompt's pages from storage to the host. Created by `Tiers.prefetch`.

    Attributes:
        loaded: positions that can be used because of it so far.
        users: number of requests that want it.
        shared: whether there was ever more than one.
        wanted: whether a request asked for it; no request waits for a prefetch of `warm`.
        bidirectional: whether a request may go on computing while it reads.
    """

    def __init__(
        self,
        reader: Reader,
        namespace: bytes,
        point: AttachPoint,
        wait: Wait,
        plan: Plan,
        min_pages: int,
        bidirectional: bool,
        on_end: Callable[[], object],
    ) -> None:
        self.users, self.loaded = 1, 0
        self.shared = self.wanted = False
        self._reader, self._namespace, self._point, self._wait = reader, namespace, point, wait
        self._store, self._plan, self._min_pages, self._on_end = reader.store, plan, min_pages, on_end
        self._page_size = reader.host.tree.page_size
        self.bidirectional = (
            bidirectional and plan.any_end and point.connected and self._store.config.prefetch == "timeout"
        )
        self._phase = Phase.LOOKUP
        self._depth = plan.have  # the end that it aims at
        self._promised: int | None = None  # the end that storage seemed to have at first, and the host has room for
        self._offer: int | None = None  # the deepest end, as this rank sees it
        self._reads = Reads(reader, self._may_settle, self._arrived)
        self._load: BidirectionalLoad | None = None  # once a request computes meanwhile, or is expected to
        self._expired = False  # whether its requests wait no more
        self._counted = False  # whether what was late then has been counted
        self._shortfall = Shortfall(reader.late)
        self._asked = [(row, plan.asked(row.number)) for row in reader.rows]
        every_end = not (reader.pending.alone or plan.any_end)
        search = partial(plan.search, every_end=every_end)
        self._lookup = lookup = point.look_up(self._store, self._asked, search)
        reader.pending.add(Polled(lambda: self._answer() if lookup.done() else 0, self._found))
        reader.pending.add(Polled(self._late, self._expire))

    @property
    def ended(self) -> bool:
        """Whether no more pages will arrive."""
        return self._phase is Phase.ENDED

    @property
    def waiting(self) -> bool:
        """Whether the request should wait for more."""
        return not (self.ended or self._expired or self._store.config.prefetch == "best_effort")

    def revoke(self) -> None:
        """Withdraws one request. With none left, no more reads begin; pages being read are still kept."""
        self.users -= 1

    def private_pages(self, row: int) -> int:
        """Returns the number of host pages of a component that are being read into and not in the tree yet."""
        held = self._load.private_pages if self._load is not None and row == 0 else 0
        return held + self._reads.private_pages(row)

    def check(self) -> None:
        """Verifies what it aims at, and that it reads each page once.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        self._reads.check()
        plan, backward = self._plan, self._phase is Phase.BACKWARD
        rules = {
            "it is wanted by nobody or some": self.users >= 0,
            "it aims at an end within the prompt": plan.have <= self._depth <= plan.pages,
            "it aims at what it was promised": self._promised is None or plan.have <= self._promised <= plan.pages,
            "whole pages are loaded": self.loaded >= 0 and self.loaded % self._page_size == 0,
            "what is late is counted after the wait": self._expired or not self._counted,
            "pages before the front are computed": not backward or self._load is not None,
        }
        check_rules("a prefetch", rules)

    def _enter(self, phase: Phase) -> None:
        assert phase in _NEXT[self._phase], (self._phase, phase)
        self._phase = phase

    # ---------------------------------------------------------------- a request that computes meanwhile

    def lead(self, key: bytes, computed: int) -> bool:
        """Lets a request compute from the front, while this reads from the back; returns whether it may.

        Only one may at a time, and only if its prompt begins with the one that is read.

        Args:
            computed: positions that it need not compute.
        """
        led = self._load is not None and self._load.led
        if not self.bidirectional or self.ended or led or not self._point.begins(key):
            return False
        load = self._turn_around()
        load.led, load.front = True, computed // self._page_size
        if self._phase in (Phase.FORWARD, Phase.DRAINING):
            self._enter(Phase.BACKWARD)
        return True

    def _turn_around(self) -> BidirectionalLoad:
        if self._load is None:
            self._load = BidirectionalLoad(self._point, self._reader.host, self._reader.backups)
        return self._load

    def reached(self, computed: int) -> None:
        """Notes how many positions the leader has computed and published."""
        if self._load is not None:
            front, self._load.front = self._load.front, computed // self._page_size
            end = min(self._load.front, self._expected)
            self._load.meanwhile += max(0, end - front)
            self._shortfall.note(front, end, self._why_computed)

    def ahead(self, computed: int) -> int | None:
        """Returns how many positions the leader computes next at most; None: as many as it likes.

        0: none in this step. What comes next has arrived, or is expected so soon that computing gains nothing.
        """
        load, size = self._load, self._page_size
        if load is None or self.ended:
            return None
        load.front = front = computed // size
        load.positions = self._reader.pending.agreed(self._worth_computing(front))
        end, pages = computed + load.positions, load.ahead(front)
        if pages is not None:
            end = min(end, (front + pages) * size)
        return max(0, end // size * size - computed)

    @property
    def usable(self) -> int:
        """Positions of the prompt up to the end of what it has added to the tree."""
        return self._point.pages * self._page_size

    def stop_leading(self) -> None:
        """Notes that the leader has computed its prompt, or has ended. Counts what it computed meanwhile."""
        load = self._load
        assert load is not None
        load.led = False
        if self.wanted and not self._counted:
            self._reader.late[self._why_computed] += load.meanwhile
            load.meanwhile = 0
            if self._phase is Phase.LOOKUP:
                self._store.calls.gave_up(self._wait.waited_s)

    def go_on(self) -> None:
        """Adds to the tree what the front has met, and begins more reads."""
        if self._phase is Phase.BACKWARD and self._load is not None:
            self._join(self._load)
            self._read_back(self._load)

    def _worth_computing(self, front: int) -> int:
        """Returns how many positions to compute before looking again, as this rank sees it; `ANY`: do not wait."""
        if self._overdue():
            return ANY
        looked_up = self._phase is not Phase.LOOKUP
        end = self._depth if looked_up else self._plan.pages
        if self._load is not None and (pages := self._load.ahead(front)) is not None:
            end = front + pages
        spans = self._reads.spans(front, end)
        if looked_up and not spans:
            return ANY
        certain = min((begin for begin, _ in spans), default=front) - front  # nobody reads these
        later = sum(last - begin for begin, last in self._reads.spans_left(front, end))
        return max(certain * self._page_size, self._wait.positions(front, self._reads.under_way, later))

    def _join(self, load: BidirectionalLoad) -> None:
        ours = load.join()
        self._reader.pending.counts["prefetched"] += ours
        self.loaded += ours * self._page_size
        if load.broken:
            self._shortfall.without_room()
            self._reads.left.clear()
            self._reader.pending.counts["prefetch_dropped"] += load.release()

    def _take(self, load: BidirectionalLoad, read: Read) -> None:
        """Keeps what has arrived until the front meets it. The pages after a lost one are read again."""
        lost = read.begin + read.good
        self._reader.host.pools[0].release(read.page_ids[read.good :])
        if read.good:
            load.add(read.begin, read.page_ids[: read.good])
        if lost < read.end:
            self._shortfall.lost(read.fault)
            self._shortfall.count(lost, read.end if read.failed else lost + 1, "fault")
            self._plan.stored[0][lost] = False
            if lost + 1 < read.end and not read.failed:
                self._reads.put_back(lost + 1, read.end)

    def _read_back(self, load: BidirectionalLoad) -> None:
        config = self._store.config
        soon = load.positions // self._page_size if load.led and load.positions < ANY else 0
        share = max(_LEAST_READ, -(-(self._depth - self._plan.have) // config.batches))  # so that a part can be met
        while self.users > 0 and not load.broken and len(self._reads) < config.batches:
            room = self._reader.room(self.private_pages(0))
            begin, end = load.next_read(self._reads.left, load.front + soon, self._depth, room)
            page_ids = self._reader.allocate(self._namespace, 0, min(end - begin, share))
            if not len(page_ids):
                break
            self._reads.cut(end - len(page_ids), end)
            self._begin_read(0, end - len(page_ids), page_ids)
        if not self._reads and (self.users <= 0 or not load):
            self._reader.pending.counts["prefetch_dropped"] += load.release()
            self._end()

    # ---------------------------------------------------------------- how long to wait, and what was missed

    def missed(self, key: bytes) -> list[Missed]:
        """Returns what a request could not use so far, each page with the first cause.

        Args:
            key: the symbols of its prompt; only pages that it shares with the one that is read count.
        """
        meanwhile = None if self.ended else Missed(self._usable, self._expected, "meanwhile")
        return self._shortfall.within(self._point.shared(key), meanwhile)

    def _late(self) -> bool:
        """Whether a request should stop waiting, as this rank sees it."""
        if self.bidirectional:
            return self.ended or self._worth_computing(self._point.pages) > 0
        return self.ended or self._wait.over or self._overdue()

    def _expire(self, outcome: int) -> None:
        """Ends the wait of its requests. If storage has not answered the lookup, it is marked as slow."""
        self._expired = True
        if self.bidirectional and not (self._wait.over or self._overdue()):
            return  # nothing is late yet: see `stop_leading`
        if self.wanted and self.users > 0:
            self._counted = True
            end = self._plan.pages if self._phase is Phase.LOOKUP or self._lookup.refused else self._expected
            self._shortfall.count(self._usable, end, self._why())
        if self.wanted and self._phase is Phase.LOOKUP:
            self._store.calls.gave_up(self._wait.waited_s)

    def _overdue(self) -> bool:
        return self._lookup.overdue() or self._reads.overdue

    def _why(self) -> Cause:
        """Returns why no request waits for the missing pages."""
        if self._lookup.refused or self._store.breaker.open:
            return "breaker"
        if self._shortfall.obstacle is not None:
            return self._shortfall.obstacle
        return "slow" if self._store.slow and not self._overdue() else "timeout"

    @property
    def _why_computed(self) -> Cause:
        return self._why() if self._phase is Phase.LOOKUP else "meanwhile"

    @property
    def _expected(self) -> int:
        """The end that storage is expected to have: that of the prompt, until it has answered."""
        if self._phase is Phase.LOOKUP:
            return self._plan.pages
        return self._plan.have if self._promised is None else self._promised

    @property
    def _usable(self) -> int:
        """The end from which a request can go on because of it."""
        if self._plan.any_end:
            return self._point.pages
        reading = self._phase in (Phase.LOOKUP, Phase.AGREEING) or self._reads.left or self._reads
        return self._plan.have if reading else self._depth

    # ---------------------------------------------------------------- what to aim at

    def _answer(self) -> int:
        """Votes for the deepest end, once storage has answered."""
        if self._offer is None:
            answer = self._lookup.value
            self._point.take(answer.names)
            for (row, pages), there in zip(self._asked, answer.there, strict=False):  # nothing, if the call failed
                self._plan.stored[row.number][pages] = there
            self._offer = self._plan.deepest(self._plan.pages)
        return 1 + self._offer

    def _found(self, outcome: int) -> None:
        self._enter(Phase.AGREEING)
        if self._lookup.failed:
            cause: Cause = "breaker" if self._lookup.refused else "fault"
            self._shortfall.failed(self._plan.have, self._plan.pages, cause, self._lookup.fault)
        self._wait.answered(outcome - 1 - self._plan.have, self._lookup.took_s)
        self._agreed(self._plan.pages, outcome)

    def _propose(self, most: int) -> None:
        """Aims at the deepest end of at most `most` pages that every rank can reach."""
        self._enter(Phase.AGREEING)
        offer = self._plan.deepest(most)
        if self._reader.pending.alone:
            self._aim(offer)
        else:
            self._reader.pending.add(Polled(lambda: 1 + offer, partial(self._agreed, most)))

    def _agreed(self, most: int, outcome: int) -> None:
        """Aims at the lowest offer of the ranks. If it is below `most`, a rank that offered more may lack it."""
        depth = outcome - 1
        if self._reader.pending.alone or self._plan.any_end or depth in (most, self._plan.have):
            self._aim(depth)
        else:
            self._propose(depth)

    def _aim(self, depth: int) -> None:
        """Begins to read what an end needs."""
        if self._promised is None:
            self._promised = depth = self._worth_reading(depth)
            if self.bidirectional and self._reader.pending.agreed(self._wait.gains(depth - self._plan.have)):
                self._turn_around()
        self._depth = depth
        self._point.back_to(depth)
        self._point.mark_held(self._plan)
        self._reads.left = deque(self._plan.missing(depth) if depth > self._plan.have else ())
        if self._load is None:
            self._enter(Phase.FORWARD)
            self._read_forward()
        else:
            self._enter(Phase.BACKWARD)
            self._read_back(self._load)

    def _worth_reading(self, depth: int) -> int:
        """Returns the end that storage has, or none if that is too near. Notes which component limits it."""
        have = self._plan.have
        pages, component = self._reader.note_short(self._plan, depth)
        self._shortfall.note(depth, depth + pages, "component", component)
        if depth - have >= self._min_pages:
            return depth
        self._shortfall.note(have, depth, "too_few")
        return have

    # ---------------------------------------------------------------- reads

    def _read_forward(self) -> None:
        """Begins more reads; ends if there are none."""
        config = self._store.config
        left = self._reads.left
        while self.users > 0 and left and len(self._reads) < config.batches:
            row, begin, end = left[0]
            page_ids = self._reader.allocate(self._namespace, row, end - begin)
            if len(page_ids):
                left.popleft()
                if begin + len(page_ids) < end:
                    left.appendleft((row, begin + len(page_ids), end))
                self._begin_read(row, begin, page_ids)
            elif self._reads:
                break  # a read under way may make room
            else:
                self._do_without_room(row)
                return
        if not self._reads and (self.users <= 0 or not left):
            if not self._plan.any_end:
                self.loaded = (self._usable - self._plan.have) * self._page_size
            self._end()

    def _end(self) -> None:
        self._enter(Phase.ENDED)
        self._point.release()
        self._on_end()

    def _begin_read(self, row: int, begin: int, page_ids: Ids) -> None:
        self._wait.asked(self._reads.all_done)
        self._reads.begin(row, begin, self._point.names(begin, begin + len(page_ids)), page_ids)

    def _may_settle(self) -> bool:
        """Whether pages that were read can be added to the tree."""
        return self._phase is Phase.BACKWARD or not self._point.in_flight

    def _arrived(self, read: Read) -> None:
        if read.row == 0 and read.call is not None and not read.failed:
            self._wait.arrived(len(read.page_ids), read.call.ended_s)
        if self._phase is Phase.BACKWARD and self._load is not None:  # it goes on at the next poll
            for ended in self._reads.take_ended():
                self._take(self._load, ended)
            return
        self._place_in_order()
        if self._phase is Phase.FORWARD:
            self._read_forward()
        elif not self._reads:
            self._aim_again()

    def _place_in_order(self) -> None:
        """Adds to the tree what has arrived up to the first read under way; nothing after a page that did not."""
        host, counts = self._reader.host, self._reader.pending.counts
        for read in self._reads.take_in_order():
            good = read.good if self._phase is Phase.FORWARD else 0
            kept, ours = self._point.place(read.row, read.begin, read.page_ids[:good])
            counts["prefetched"] += ours
            counts["prefetch_dropped"] += good - ours
            if self._plan.any_end:
                self.loaded += ours * self._page_size
            host.pools[read.row].release(read.page_ids[good:])
            if kept < len(read.page_ids) and self._phase is Phase.FORWARD:
                self._enter(Phase.DRAINING)
                self._shortfall.lost(read.fault)
                self._plan.stored[read.row][read.begin + kept] = False
                if kept < good:  # the host has lost what is before it: nothing more can be added
                    self._reads.left.clear()
                    self._depth = self._plan.have

    def _aim_again(self) -> None:
        """Aims at what is left without a page that did not arrive."""
        if self._depth > self._plan.have:
            self._point.mark_held(self._plan)
            self._propose(self._depth)
        else:
            self._end()

    def _do_without_room(self, row: int) -> None:
        """Aims at what is left if the host has no room for more pages of a component."""
        most = self._point.pages if row == 0 and self._point.connected else self._plan.have
        if self.wanted and not self._expired:
            self._shortfall.count(most, self._depth, "host_room")
        self._shortfall.without_room()
        self._promised = most
        self._propose(most)
