"""What a caller holds of a transfer that was submitted."""

from __future__ import annotations

import abc
import dataclasses

from kvferry.errors import TransferError, TransferFaultError
from kvferry.transfer.plan import TransferPlan
from kvferry.transfer.route import Route

__all__ = ["DEFAULT_TIMEOUT_SECS", "CompletedTransfer", "TransferHandle"]

DEFAULT_TIMEOUT_SECS = 60.0
"""How long `TransferHandle.wait` waits unless told otherwise."""


class TransferHandle(abc.ABC):
    """One transfer. It keeps alive every buffer and index that the copy needs until it is over.

    `wait_layer` and `wait_all` order the caller's later work after the bytes; they promise nothing
    about what the bytes are. Read `verified_pages` before anything computed from a load leaves the
    engine, and compute again from the first page that is not verified.
    """

    plan: TransferPlan
    route: Route | None = None
    """Which mover carries it on a GPU, in which steps, and why; None in host memory."""

    @property
    def link_seconds(self) -> tuple[float, float] | None:
        """When its first byte went onto the link and when its last was over, by the GPU's clock.

        Seconds since some moment. None until it is done, after a failure, and where the engine was
        not made with ``timed=True``.
        """
        return None

    def __repr__(self) -> str:
        told = f"path={self.path!r}, {self.plan.direction.value}, pages={self.plan.num_pages}"
        if not self.done:
            return f"{type(self).__name__}({told}, running)"
        return (
            f"{type(self).__name__}({told}, verified={self.verified}, "
            f"verified_pages={self.verified_pages}, bad_pages={self.bad_pages}, "
            f"error={self.error!r})"
        )

    @property
    @abc.abstractmethod
    def path(self) -> str:
        """Which way the bytes took, such as ``cpu``."""

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the transfer is over, well or not. Never blocks."""

    @property
    @abc.abstractmethod
    def error(self) -> TransferError | None:
        """Why the transfer failed, or None. Never blocks."""

    @property
    @abc.abstractmethod
    def verified(self) -> bool:
        """Whether digests are made (store) or checked (load) at all; False where they are off.

        It is no verdict on the bytes: that is `verified_pages`, with `bad_pages`. A load with bad
        pages has ``verified=True``, and found them because of it.
        """

    @property
    @abc.abstractmethod
    def bad_pages(self) -> tuple[int, ...]:
        """Positions in the plan of pages whose bytes are not what was stored, ascending.

        Empty until the transfer is done. What such a page's rows on the device hold is undefined.
        """

    @property
    def verified_pages(self) -> int:
        """How many leading pages of the plan are there with the right bytes.

        0 until the transfer is done, after a failure, and where `verified` is False.
        """
        if not self.done or self.error is not None or not self.verified:
            return 0
        bad = self.bad_pages
        return bad[0] if bad else self.plan.num_pages

    @abc.abstractmethod
    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        """Order later work on `stream` after the bytes of model layer `layer`. Does not block.

        Args:
            layer: A model layer that the plan moves.
            stream: Handle of a stream of the device; None: the caller's current one. In host
                memory there are no streams, and the bytes are there.

        Raises:
            TransferError: The plan does not move that layer, or the transfer failed.
        """

    @abc.abstractmethod
    def wait_all(self, stream: int | None = None) -> None:
        """`wait_layer` for every layer of the plan."""

    @abc.abstractmethod
    def wait(self, timeout: float = DEFAULT_TIMEOUT_SECS) -> None:
        """Block until the transfer is over on both sides; afterwards `done` is True.

        Raises:
            TransferError: The transfer failed. A page that fails its digest is no failure: it is
                in `bad_pages`.
            TransferTimeoutError: `timeout` seconds passed; the transfer goes on.
        """


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CompletedTransfer(TransferHandle):
    """A transfer that was over when it was submitted: every wait returns or raises at once."""

    plan: TransferPlan
    path_name: str
    digests_checked: bool
    failed_pages: tuple[int, ...] = ()
    fault: TransferFaultError | None = None

    @property
    def path(self) -> str:
        return self.path_name

    @property
    def done(self) -> bool:
        return True

    @property
    def error(self) -> TransferError | None:
        return self.fault

    @property
    def verified(self) -> bool:
        return self.digests_checked

    @property
    def bad_pages(self) -> tuple[int, ...]:
        return self.failed_pages

    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        if layer not in self.plan.model_layers:
            raise TransferError(
                f"model layer {layer} is not part of this transfer; it moves layers "
                f"{', '.join(map(str, self.plan.model_layers))}"
            )
        self.wait_all(stream)

    def wait_all(self, stream: int | None = None) -> None:
        if stream is not None:
            raise TransferError(
                f"stream {stream}: path {self.path} has no streams; its transfers are over when "
                f"they return, so wait without one"
            )
        self.wait()

    def wait(self, timeout: float = DEFAULT_TIMEOUT_SECS) -> None:  # noqa: ARG002 (nothing to wait for)
        if self.fault is not None:
            raise self.fault
