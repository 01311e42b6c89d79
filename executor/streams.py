"""A logical stream: what is queued on it runs in order, beside the host, and its end is seen when it comes.

Of a gloo send or receive nobody learns that it has ended but who waits for it (`is_completed` stays false until then,
torch 2.13). So each stream has a thread that waits, and does little else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from executor.transport.base import Handle


class Queued:
    """One communication op on its stream. start_s: when the stream came to it; end_s: when it was done."""

    def __init__(self, post: Callable[[], Handle], needs: Sequence[Queued] = ()) -> None:
        self._post: Callable[[], Handle] | None = post
        self.needs = tuple(needs)
        self.start_s = self.end_s = 0.0
        self.error: BaseException | None = None
        self._handle: Handle | None = None
        self._done = threading.Event()

    @property
    def posted(self) -> bool:
        """Whether it has been given to the transport."""
        return self._handle is not None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until it has ended; raises what went wrong."""
        self._done.wait()
        if self.error is not None:
            raise self.error

    def post(self) -> None:
        """Give it to the transport."""
        assert self._post is not None
        self.start_s = time.monotonic()
        self._handle = self._post()

    def finish(self, stream_free_s: float) -> None:
        """The thread's part: post if that could not be done at once, and wait for the end."""
        try:
            for op in self.needs:
                op.wait()
            if self._handle is None:
                self.post()
            assert self._handle is not None
            self._handle.wait()
            self._post, self.needs = None, ()  # let go of the tensors and of what went before
        except BaseException as error:
            self.error = error
        self.start_s = max(self.start_s, stream_free_s)
        self.end_s = time.monotonic()
        self._done.set()


class Stream:
    """A queue of communication ops and the thread that waits for their ends.

    >>> class Now:
    ...     def wait(self): pass
    >>> stream = Stream("send>1"); a, b = Queued(Now), Queued(Now)
    >>> stream.put(a); stream.put(b); b.wait(); stream.close()
    >>> a.done(), a.end_s <= b.start_s
    (True, True)
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Queued | None] = SimpleQueue()
        self._last: Queued | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, op: Queued) -> None:
        """Queue an op. What waits for nothing is posted by the caller, at once: a receive may stand ready early."""
        if (self._last is None or self._last.posted) and all(n.done() for n in op.needs):
            op.post()
        self._last = op
        self._queue.put(op)

    def close(self) -> None:
        """No more ops; every op has been waited for."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        free_s = 0.0
        while (op := self._queue.get()) is not None:
            op.finish(free_s)
            free_s = op.end_s
