"""Computing caches that were taken out of a batch, a few arrays with every token.

What mlx-lm hands over at a cut or at the end of a reply are copies that are still to be made.
Made at once they hold up the next token of everybody else by as long as the whole cache takes
to be copied. Here each step of the batch carries along a piece: its sampled tokens depend on
a few of the arrays, so that they are computed with the step, by the same call, and the thread
that generates waits for nothing on our account.  What is to be done for each of several
replies that end at once is done step by step, too, and not where a request has just begun. What
a client waits for, the end of its reply, comes before all else; what is only stored comes last.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.beside import Blocking
from pion_vllm_mlx.cache.pace import Pace

Then = Callable[[], None]
Sampler = Callable[[mx.array], mx.array]
Guard = Callable[[Callable[[], Any], Any], Any]
"""Gives what its first argument gives, and its second where that fails."""

#: of one step. An array is not divided: one is always carried, whatever its size.
MOST_ARRAYS = 16
CPU_BYTES = 4 << 20
GPU_BYTES = 32 << 20
#: another job that a client waits for is done in a step where those before took less.
SHORT_SECONDS = 0.0005
#: what waits is done within about so many steps, however much it is.
MOST_STEPS = 64
_END = object()


@dataclass
class _Part:
    """Arrays that are still to be computed, and what is to be done when all are scheduled."""

    arrays: deque[mx.array]
    then: Then


class Spread:
    """What is to be computed, in order. For the thread that generates."""

    def __init__(self) -> None:
        gpu = mx.default_device().type == mx.DeviceType.gpu
        self.least_bytes = GPU_BYTES if gpu else CPU_BYTES
        #: when the threads beside this one may work
        self.pace = Pace()
        self._parts: deque[_Part] = deque()
        self._waiting_bytes = 0
        #: what a client waits for comes first, and what is only stored last
        self._ending: deque[Then] = deque()
        self._jobs: deque[tuple[object, Then]] = deque()
        self._storing: deque[Then] = deque()
        self._doing = 0
        self._asked = False
        self._sampled = False
        self._carrying = False
        #: that which generates, once it has added something
        self._thread: int | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the arrays that no step has carried yet."""
        return self._waiting_bytes

    @property
    def waiting(self) -> int:
        """How much is to be computed or done for caches that are kept, or is being done now."""
        jobs = len(self._ending) + len(self._jobs) + len(self._storing)
        return self._doing + jobs + len(self._parts)

    def add(self, arrays: Sequence[mx.array], then: Then = lambda: None) -> None:
        """Has ``arrays`` computed soon; ``then`` is called when the last one is scheduled."""
        self._thread = threading.get_ident()
        self._parts.append(_Part(deque(arrays), then))
        self._waiting_bytes += sum(array.nbytes for array in arrays)

    def soon(self, job: Then, *, of: object, ending: bool) -> None:
        """Has ``job`` of one request done between two of the next steps.

        ``ending``: a client waits for it, and for what is to be done before of that request.
        """
        self._thread = threading.get_ident()
        self._jobs.append((of, job))
        if ending:
            self._ending += [one for whose, one in self._jobs if whose is of]
            self._jobs = deque(entry for entry in self._jobs if entry[0] is not of)

    def store(self, keeping: Iterator[None], blocking: Blocking, guarded: Guard) -> None:
        """Has caches stored, in steps of their own: what is new is found, then it is taken.

        ``keeping`` is what a lineage store's method of that name gives; how long a step takes is
        noted as ``store``, that of the others as ``take``.
        """

        def step(name: str) -> None:
            with blocking.measured(name):
                goes_on = guarded(lambda: next(keeping, _END) is not _END, False)
            if goes_on:
                self._storing.appendleft(partial(step, "take"))

        self._thread = threading.get_ident()
        self._storing.append(partial(step, "store"))

    def work(self, begun: bool) -> None:
        """Does what is next; where a request has ``begun`` since the last step, what ends others.

        To be called once between two steps, also those that only prefill; where it was not,
        ``stepped`` does it.
        """
        self._do_next(begun)
        self._asked = True

    @property
    def idle(self) -> bool:
        """Whether nothing is to be computed or done."""
        return not self.waiting

    def _do_next(self, begun: bool) -> None:
        until = time.perf_counter() + SHORT_SECONDS
        while self._has_next(begun):
            self._do(self._next_job)
            if not self._ending or time.perf_counter() > until:
                return

    def _do(self, take: Callable[[], Then]) -> None:
        """Does what ``take`` takes out of what waits; ``waiting`` counts it all the time."""
        self._doing += 1
        try:
            take()()
        finally:
            self._doing -= 1

    def _has_next(self, begun: bool) -> bool:
        return bool(self._ending or (not begun and (self._jobs or self._storing)))

    def _next_job(self) -> Then:
        if self._ending:
            return self._ending.popleft()
        return self._jobs.popleft()[1] if self._jobs else self._storing.popleft()

    def carrying(self, make_sampler: Callable[..., Sampler]) -> Callable[..., Sampler]:
        """``make_sampler``, whose samplers' tokens carry pieces."""

        def make(*args: Any) -> Sampler:
            return self.sampling(make_sampler(*args))

        return make

    def sampling(self, sample: Sampler) -> Sampler:
        """``sample``, whose tokens carry pieces."""
        return lambda logits: self.carried(sample(logits))

    def carried(self, sampled: mx.array) -> mx.array:
        """The same tokens, which depend on the next piece: once a step."""
        self._sampled = True
        self.pace.step()
        if self._carrying or not self._parts:
            return sampled
        self._carrying = True
        piece = self._piece()
        return mx.depends(sampled, piece) if piece else sampled

    def stepped(self) -> None:
        """A step has been scheduled, with the piece that it carries.

        May be called more than once a step.
        """
        self._carrying = False
        while self._parts and not self._parts[0].arrays:
            self._do(lambda: self._parts.popleft().then)
        if self._sampled:
            self._sampled = False
            if not self._asked:
                self._do_next(begun=False)
            self._asked = False

    def finish(self) -> None:
        """Does and schedules all that waits: nobody is held up."""
        self.pace.ended()
        while self._has_next(begun=False):
            self._do(self._next_job)
        arrays = [array for part in self._parts for array in part.arrays]
        for part in self._parts:  # first: what cannot be computed is not tried again
            part.arrays.clear()
        self._waiting_bytes = 0
        if arrays:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        self.stepped()

    def finish_here(self) -> bool:
        """``finish`` on the thread that generates; on others whether nothing waits."""
        if self.idle:
            return True
        if threading.get_ident() != self._thread:
            return False
        self.finish()
        return True

    def _piece(self) -> list[mx.array]:
        """The next arrays, as many as a step may carry."""
        allowed = max(self.least_bytes, self._waiting_bytes // MOST_STEPS)
        piece: list[mx.array] = []
        for part in self._parts:
            while part.arrays:
                size = part.arrays[0].nbytes
                if piece and (len(piece) == MOST_ARRAYS or size > allowed):
                    return piece
                piece.append(part.arrays.popleft())
                allowed -= size
                self._waiting_bytes -= size
        return piece
