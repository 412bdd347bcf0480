"""The batches of a server: what they are made of, and how they run.

    validating -> in_progress -> finalizing -> completed
        |             |-> cancelling -> cancelled
        '-> failed <--'-> expired

Each owner's batches run one after another, at the lowest priority, through the application itself: so whatever holds
for a request holds for one in a batch. Each answer is written to the files of its batch at once, so a batch goes on
after a restart, and a request whose answer is there is not sent again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, closing
from functools import partial

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from mainstem.batch.answers import Answers, Failure, Response
from mainstem.batch.lines import BadBatch, Requests
from mainstem.batch.ordering import TEXT_PAGE, planned, text_prompt
from mainstem.batch.runner import Reply, Runner, Send
from mainstem.errors import MainstemError
from mainstem.server.batches.shelf import BatchError, BatchErrors, BatchObject, Counts, FileObject, Shelf

log = logging.getLogger(__name__)

_AT_ONCE = 8  # requests of all batches that are in the engine
_LINE_BYTES = 4096  # of an answer, at most, besides its body
_LOOK_S = 0.1  # between two looks for new batches
_AGAIN_S = 30.0  # until one is tried again whose end could not be written

_LEFT_OUT = {
    "cancelled": Failure("batch_cancelled", "The batch was cancelled before this request was answered."),
    "expired": Failure("batch_expired", "The batch expired before this request was answered."),
}


class Batches:
    """Runs the batches of a shelf.

    Args:
        shelf: keeps them.
        sender: returns what sends the requests of an owner; None: the server has no such key any more.
        now: seconds since the epoch.
        draining: whether the server is about to end.
        most_bytes: of a line of requests.
    """

    def __init__(
        self,
        shelf: Shelf,
        sender: Callable[[str], Send | None],
        now: Callable[[], float],
        draining: Callable[[], bool],
        most_bytes: int,
    ) -> None:
        self._shelf, self._sender, self._now, self._draining = shelf, sender, now, draining
        self._most_bytes = most_bytes
        self._live: dict[str, _Run] = {}  # by the id of the batch
        self._sending = anyio.CapacityLimiter(_AT_ONCE)
        self._ending = threading.Lock()  # a batch is cancelled or ends, not both

    async def run(self) -> None:
        """Runs batches until it is cancelled."""
        async with anyio.create_task_group() as group:
            while True:
                unfinished = await anyio.to_thread.run_sync(self._shelf.unfinished)
                for owner, batch in [] if self._draining() else unfinished:
                    busy = any(run.owner == owner for run in self._live.values())
                    ends = batch.cancelling_at is not None or self._now() >= batch.expires_at
                    if batch.id not in self._live and (ends or not busy):
                        given = (self._now, self._draining, self._most_bytes, self._ending)
                        self._live[batch.id] = _Run(self._shelf, owner, batch, *given)
                        group.start_soon(self._run, batch.id)
                await anyio.sleep(_LOOK_S)

    def cancel(self, owner: str, batch: BatchObject) -> BatchObject:
        """Lets a batch end: what is under way is answered, and the rest has an error."""
        with self._ending:
            if batch.ended_at is None and batch.cancelling_at is None:
                batch.status, batch.cancelling_at = "cancelling", int(self._now())
                self._shelf.put(owner, batch)
        return batch

    def counted(self, batch: BatchObject) -> BatchObject:
        """Returns a batch with the counts of this moment."""
        if (run := self._live.get(batch.id)) is not None:
            run.count()
        return batch

    async def _run(self, id: str) -> None:
        run = self._live[id]
        sends = self._sender(run.owner)
        try:
            await run.run(None if sends is None else partial(self._send, sends))
        except Exception:  # of one batch; others go on
            log.exception("batch %s failed", id)
            try:
                error = BatchError("server_error", "The server had an error while running the batch.")
                await anyio.to_thread.run_sync(run.fail, [error])
            except Exception:  # e.g. the disk is full
                log.exception("the end of batch %s cannot be written; it is tried again in %g s", id, _AGAIN_S)
                await anyio.sleep(_AGAIN_S)
        finally:
            del self._live[id]

    async def _send(self, send: Send, path: str, body: bytes) -> Reply:
        async with self._sending:
            return await send(path, body)


async def _on_a_thread(work: Callable[[], None]) -> None:
    """Does what waits for the disk, also where the task is cancelled."""
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(work)


class _Run:
    """One batch while it runs.

    Args:
        shelf: keeps it.
        owner, batch: which one.
        now, draining, most_bytes: see `Batches`.
        ending: is held while the batch ends, or is cancelled.
    """

    def __init__(
        self,
        shelf: Shelf,
        owner: str,
        batch: BatchObject,
        now: Callable[[], float],
        draining: Callable[[], bool],
        most_bytes: int,
        ending: threading.Lock,
    ) -> None:
        self._shelf, self._now, self._draining, self._ending = shelf, now, draining, ending
        self._most_bytes = most_bytes
        self.owner, self.batch = owner, batch
        self._good: Answers | None = None
        self._bad: Answers | None = None

    async def run(self, send: Send | None) -> None:
        """Runs the batch to its end, or until the server drains."""
        async with AsyncExitStack() as ends:
            stack = ExitStack()
            ends.push_async_callback(_on_a_thread, stack.close)
            try:
                requests = await anyio.to_thread.run_sync(self._open, stack)
                if send is None:
                    raise MainstemError("the server does not have the API key of this batch any more")
                await self._answer(requests, send)
                if not self._draining():
                    await anyio.to_thread.run_sync(self._end, requests)
            except (MainstemError, OSError) as error:
                problems = error.problems if isinstance(error, BadBatch) else []
                errors = [BatchError(code, message, line) for line, code, message in problems]
                await anyio.to_thread.run_sync(
                    self.fail, errors or [BatchError("batch_failed", self._shelf.said(error))]
                )

    def count(self) -> None:
        """Brings the counts of the batch up to date."""
        if self._good is not None and self._bad is not None:
            counts = self.batch.request_counts
            counts.completed = int(self._good.answered.sum())
            counts.failed = int(self._bad.answered.sum())

    def fail(self, errors: list[BatchError]) -> None:
        """Ends the batch with errors; what was answered stays."""
        self.batch.errors = BatchErrors(errors)
        self._finish("failed")

    def _open(self, stack: ExitStack) -> Requests:
        """Reads and checks the file, and what was answered before a restart."""
        batch = self.batch
        source, good, bad = map(self._shelf.path, batch.files)
        kept = self._shelf.get(self.owner, batch.files[0], FileObject)
        if kept is not None and source.stat().st_size != kept.bytes:
            raise MainstemError(f"the file {kept.id} does not have the {kept.bytes} bytes that were uploaded")
        requests = stack.enter_context(closing(Requests(source, batch.endpoint, most_bytes=self._most_bytes)))
        self._good, self._bad = (stack.enter_context(closing(Answers(path, requests))) for path in (good, bad))
        batch.request_counts = Counts(len(requests))
        self.count()
        if batch.status == "validating":
            batch.status, batch.in_progress_at = "in_progress", int(self._now())
        self._shelf.put(self.owner, batch)
        return requests

    async def _answer(self, requests: Requests, send: Send) -> None:
        rest = (~self._answered()).nonzero()[0].tolist()
        plan = await anyio.to_thread.run_sync(lambda: planned(requests, rest, text_prompt, page_size=TEXT_PAGE))
        runner = Runner(requests, send, self._add, self._may_send, retry_s=float("inf"))
        await runner.run(map(int, plan.order), _AT_ONCE)

    def _answered(self) -> NDArray[np.bool_]:
        assert self._good is not None and self._bad is not None
        return self._good.answered | self._bad.answered

    async def _may_send(self) -> bool:
        ends = self.batch.cancelling_at is not None or self._now() >= self.batch.expires_at
        return not (ends or self._draining())

    def _add(self, index: int, response: Response | None, failure: Failure | None = None) -> None:
        good = response is not None and response.status_code == 200
        answers, id = (self._good, self.batch.files[1]) if good else (self._bad, self.batch.files[2])
        assert answers is not None
        size = _LINE_BYTES + (0 if response is None else len(bytes(response.body)))
        if not self._shelf.reserve(self.owner, id, answers.size + size):
            raise MainstemError("the files of this key are as large as they may be (option --batch-bytes)")
        answers.add(index, response, failure)
        self._shelf.reserve(self.owner, id, answers.size)

    def _end(self, requests: Requests) -> None:
        """Ends the batch: what is not answered has an error."""
        status = "cancelled" if self.batch.cancelling_at is not None else "expired"
        rest = (~self._answered()).nonzero()[0].tolist()
        for index in rest:
            self._add(index, None, _LEFT_OUT[status])
        assert self._bad is not None
        if status == "expired" and _LEFT_OUT[status].code not in self._bad.codes:  # also of a process that was killed
            status = "completed"
        self._finish(status)

    def _finish(self, status: str) -> None:
        """Writes the files as clients see them, and then the end of the batch."""
        batch, now = self.batch, int(self._now())
        self.count()
        for answers in (self._good, self._bad):
            if answers is not None:
                answers.close()
        shown = []
        for id, words in zip(batch.files[1:], ("output", "errors"), strict=True):
            path = self._shelf.path(id)
            size = path.stat().st_size if path.exists() else 0
            shown.append(id if size else None)
            if size:
                self._shelf.put(self.owner, self._file(id, size, f"{batch.id}_{words}.jsonl", now))
            else:
                self._shelf.forget(self.owner, id)
        with self._ending:
            batch.output_file_id, batch.error_file_id = shown
            batch.status = status
            if status in ("completed", "expired"):
                batch.finalizing_at = now
            setattr(batch, f"{status}_at", now)
            self._shelf.put(self.owner, batch)

    def _file(self, id: str, size: int, name: str, now: int) -> FileObject:
        return FileObject(
            id=id,
            bytes=size,
            created_at=now,
            expires_at=self._shelf.expires(now),
            filename=name,
            purpose="batch_output",
        )
