"""A logical stream: what is queued on it runs in order, beside the host, and its end is seen when it comes.

Of a gloo send or receive nobody learns that it has ended but who waits for it (`is_completed` stays false until then,
torch 2.13). So each stream has a thread that waits, and does little else. Where a device has queues of its own, an op
is over for the host as soon as it is queued there: whoever needs its result follows its mark on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from executor.device.device import Device, StreamEvent
from executor.transport.base import TransportHandle


class StreamOp:
    """One communication op on its stream. needs: what else must be over first; after: a point of the compute lane."""

    def __init__(
        self, post: Callable[[], TransportHandle], needs: Sequence[StreamOp] = (), after: StreamEvent | None = None
    ) -> None:
        self._post: Callable[[], TransportHandle] | None = post
        self.needs, self.after = tuple(needs), after
        self.start: StreamEvent | None = None
        self.end: StreamEvent | None = None
        self.before: StreamEvent | None = None  # where the op before it on the stream ended
        self.error: BaseException | None = None
        self._handle: TransportHandle | None = None
        self._ended, self._busy = False, threading.Lock()  # until then; an Event is slow to make
        self._busy.acquire()

    @property
    def posted(self) -> bool:
        return self._handle is not None

    def span(self) -> tuple[float, float]:
        """When the stream came to it, and when it ended. Only of an op whose mark `end` is done."""
        assert self.start is not None and self.end is not None
        start, end = self.start.seconds(), self.end.seconds()
        return (start if self.before is None else min(end, max(start, self.before.seconds()))), end

    def done(self) -> bool:
        """Whether it is over for the host, well or not."""
        return self._ended

    def wait(self) -> None:
        """Block the host until it is over for it; raises what went wrong."""
        with self._busy:
            pass
        if self.error is not None:
            raise self.error

    def over(self) -> bool:
        """Whether waiting for what was posted would not block."""
        return self._handle is not None and self._handle.done()

    def post(self, device: Device) -> None:
        """Give it to the transport, on the active lane."""
        assert self._post is not None
        for op in self.needs:
            assert op.end is not None
            device.follow(op.end)
        if self.after is not None:
            device.follow(self.after)
        self.start = device.mark()
        self._handle = self._post()

    def finish(self, device: Device, before: StreamOp | None) -> None:
        """Post if that could not be done at once, and wait for the end, on the active lane."""
        try:
            for op in self.needs:
                op.wait()
            if self._handle is None:
                self.post(device)
            assert self._handle is not None
            self._handle.wait()
            self._post, self.needs, self.after = None, (), None  # let go of the tensors and of what went before
        except BaseException as error:
            self.error = error
        self.before = before.end if before is not None else None
        self.end = device.mark()
        self._ended = True
        self._busy.release()


@dataclass(slots=True)
class PendingTraceRow:
    """A row of the trace whose times the device may not know yet: of a compute op, or queued on a stream."""

    stream: str
    op: str
    post_s: float
    start: StreamEvent | None = None
    end: StreamEvent | None = None
    queued: StreamOp | None = None

    @property
    def last(self) -> StreamEvent:
        end = self.end if self.queued is None else self.queued.end
        assert end is not None
        return end

    def span(self) -> tuple[float, float]:
        """When it ran. Only once `last` is done."""
        if self.queued is not None:
            return self.queued.span()
        assert self.start is not None
        return self.start.seconds(), self.last.seconds()


class Stream:
    """A queue of communication ops, the device's lane for it, and the thread that waits for their ends.

    >>> from executor.device.device import HostDevice
    >>> class Now:
    ...     def done(self): return False
    ...     def wait(self): pass
    >>> stream = Stream("send>1", HostDevice()); a, b = StreamOp(Now), StreamOp(Now)
    >>> stream.put(a); stream.put(b); b.wait(); stream.close()
    >>> a.done(), a.span()[1] <= b.span()[0]
    (True, True)
    """

    def __init__(self, name: str, device: Device) -> None:
        self.device = device
        self.lane, self._name = device.lane(name), name
        self._queue: SimpleQueue[StreamOp | None] = SimpleQueue()
        self._last: StreamOp | None = None
        self._thread: threading.Thread | None = None

    def put(self, op: StreamOp) -> None:
        """Queue an op. What waits for nothing is posted by the caller, at once: a receive may stand ready early."""
        last, self._last = self._last, op
        if (last is None or last.posted) and all(n.done() for n in op.needs):
            with self.lane():
                op.post(self.device)
                if (last is None or last.done()) and op.over():
                    op.finish(self.device, last)
                    return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(last,), name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(op)

    def close(self) -> None:
        """No more ops; every op has been waited for."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _work(self, last: StreamOp | None) -> None:
        self.device.bind()
        while (op := self._queue.get()) is not None:
            with self.lane():
                op.finish(self.device, last)
            last = op
