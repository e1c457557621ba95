"""What a caller holds of a load that several ranks carry out, or that one did by itself."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from kvferry.errors import TransferError, TransferFaultError, TransferTimeoutError
from kvferry.transfer import TransferHandle

if TYPE_CHECKING:
    from kvferry.exchange.way import Way
    from kvferry.transfer import TransferPlan

__all__ = ["ShardedLoad", "WholeLoad"]

_TIMEOUT_SECS = 60.0


class WholeLoad(TransferHandle):
    """A load that this rank does by itself; what other ranks found is not known here."""

    agreed = False

    def __init__(self, inner: TransferHandle, way: Way) -> None:
        self.plan, self.route = inner.plan, inner.route
        self.way = way
        """Why it was not cut into shares."""

        self._inner = inner

    @property
    def path(self) -> str:
        return f"whole {self._inner.path}"

    @property
    def done(self) -> bool:
        return self._inner.done

    @property
    def error(self) -> TransferError | None:
        return self._inner.error

    @property
    def verified(self) -> bool:
        return self._inner.verified

    @property
    def bad_pages(self) -> tuple[int, ...]:
        return self._inner.bad_pages

    @property
    def link_seconds(self) -> tuple[float, float] | None:
        return self._inner.link_seconds

    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        self._inner.wait_layer(layer, stream)

    def wait_all(self, stream: int | None = None) -> None:
        self._inner.wait_all(stream)

    def wait(self, timeout: float = _TIMEOUT_SECS) -> None:
        self._inner.wait(timeout)


class ShardedLoad(TransferHandle):
    """A load of which each rank brings a share; the exchange goes on in a thread of the loader.

    It is over when the ranks have agreed on what came of it: bad pages are those of all of them,
    and a fault of one is an error on each. `wait_layer` waits on the CPU until the layer's bytes
    are there, or on a GPU until what brings them is in its streams; the load's own deadline ends
    that.
    """

    agreed = True

    def __init__(
        self, plan: TransferPlan, way: Way, *, verified: bool, timeout: float, size: int, mark: Any
    ) -> None:
        self.plan = plan
        self.way = way
        """Why it was cut into shares."""

        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.refused = False
        """This rank cannot take part; it only tells the others so."""

        self.mark = mark
        """Where the caller's stream was."""

        self._size = size
        self._verified = verified
        self._moves = "exchange"
        self._changed = threading.Condition()
        self._arrived: dict[int, list[TransferHandle]] = {}
        self._complete: set[int] = set()
        self._bad_pages: tuple[int, ...] = ()
        self._error: TransferFaultError | None = None
        self._over = False

    @property
    def path(self) -> str:
        return f"sharded {self._moves}"

    @property
    def left(self) -> float:
        """Seconds to its deadline, and never none: a rank without time still meets the others."""
        return max(self.deadline - time.monotonic(), 0.001)

    @property
    def done(self) -> bool:
        return self._over

    @property
    def error(self) -> TransferError | None:
        return self._error

    @property
    def verified(self) -> bool:
        return self._verified

    @property
    def bad_pages(self) -> tuple[int, ...]:
        return self._bad_pages if self._over else ()

    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        if layer not in self.plan.model_layers:
            raise TransferError(
                f"model layer {layer} is not part of this transfer; it moves layers "
                f"{', '.join(map(str, self.plan.model_layers))}"
            )
        with self._changed:
            # The loader ends the load soon after its deadline, which then is its error.
            self._changed.wait_for(
                lambda: layer in self._complete or self._over, self.left + self.timeout
            )
            if self._error is not None:
                raise TransferFaultError(*self._error.args) from self._error.__cause__
            if layer not in self._complete:
                raise TransferTimeoutError(
                    f"model layer {layer} of a sharded load has not come, {self.timeout:g} s past "
                    f"its deadline"
                )
            arrived = list(self._arrived[layer])
        for one in arrived:
            one.wait_layer(layer, stream)

    def wait_all(self, stream: int | None = None) -> None:
        for layer in self.plan.model_layers:
            self.wait_layer(layer, stream)

    def wait(self, timeout: float = _TIMEOUT_SECS) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over, timeout)
        if not self._over:
            raise TransferTimeoutError(
                f"a sharded load of {self.plan.num_pages} pages is not over after {timeout:g} s; "
                f"it goes on: wait again, its own deadline ends it"
            )
        if self._error is not None:
            raise TransferFaultError(*self._error.args) from self._error.__cause__

    def arrive(self, handle: TransferHandle, *, complete: bool) -> None:
        """For the loader: `handle` puts layers of some pages in place; `complete`: the last of
        their pages."""
        with self._changed:
            self._moves = handle.path
            for layer in handle.plan.model_layers:
                self._arrived.setdefault(layer, []).append(handle)
                if complete:
                    self._complete.add(layer)
            self._changed.notify_all()

    def finish(self, bad_pages: tuple[int, ...]) -> None:
        """For the loader: all ranks have it, but for these pages."""
        with self._changed:
            self._bad_pages = bad_pages
            self._over = True
            self._changed.notify_all()

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """For the loader: it is over, and none of its pages may be used. Once over, a no-op."""
        with self._changed:
            if self._over:
                return
            self._error = TransferFaultError(
                f"load of {self.plan.num_pages} pages in shares of {self._size} ranks failed: "
                f"{reason}"
            )
            if cause is not None:
                self._error.__cause__ = cause.with_traceback(None)
            self._over = True
            self._changed.notify_all()
