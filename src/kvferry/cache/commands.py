"""Orders that come over the control socket, carried out while the cache is polled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from kvferry.control import Answer
from kvferry.errors import ConfigError, ControlError, KVFerryError

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvferry.cache.reports import FlushReport
    from kvferry.cache.steps import Steps
    from kvferry.control import ControlSocket, Order, PendingOrder
    from kvferry.tiers import TierStats

__all__ = ["Actions", "CommandDesk"]


@dataclasses.dataclass(frozen=True)
class Actions:
    """What orders may do to a cache: its calls, step by step."""

    stats: Callable[[], TierStats]
    attach: Callable[..., Steps[None]]
    detach: Callable[..., Steps[bool]]
    flush: Callable[[float], Steps[FlushReport]]


_Command: TypeAlias = Callable[[Actions, "Order"], "Steps[dict[str, Any]]"]


class CommandDesk:
    """Carries out one order after another, a step each time that the cache is polled.

    So an order runs on the thread that owns the cache, and never holds it up: what an order waits
    for is looked at again at the next poll.

    Args:
        socket: Where orders come from; closed with this.
        actions: What they may do.
    """

    def __init__(self, socket: ControlSocket, actions: Actions) -> None:
        self._socket = socket
        self._actions = actions
        self._current: tuple[PendingOrder, Generator[None, None, dict[str, Any]]] | None = None
        self._is_stepping = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._current is not None or self._socket.has_orders

    def step(self) -> None:
        """Go on with the order that is being carried out, or begin with the next one."""
        if self._is_stepping:  # what an order does polls as well
            return
        self._is_stepping = True
        try:
            if self._current is None and (pending := self._socket.take()) is not None:
                self._begin(pending)
            if self._current is not None:
                self._go_on(*self._current)
        finally:
            self._is_stepping = False

    def _begin(self, pending: PendingOrder) -> None:
        left = pending.seconds_left
        if not left:  # its client was told that nothing was done, so nothing is
            return
        order = dataclasses.replace(pending.order, timeout=left)
        try:
            self._current = pending, _command_of(order)(self._actions, order)
        except KVFerryError as refused:
            pending.answer(Answer(ok=False, error=str(refused)))

    def _go_on(self, pending: PendingOrder, steps: Generator[None, None, dict[str, Any]]) -> None:
        try:
            next(steps)
        except StopIteration as end:
            self._current = None
            pending.answer(Answer(ok=True, result=end.value))
        except KVFerryError as bad:
            self._current = None
            pending.answer(Answer(ok=False, error=str(bad)))

    def close(self) -> None:
        """Carry out nothing more; who waits is told."""
        if self._current is not None:
            pending, steps = self._current
            self._current = None
            steps.close()
            pending.answer(Answer(ok=False, error="the cache was closed"))
        self._socket.close()


def _command_of(order: Order) -> _Command:
    found = _COMMANDS.get(order.command)
    if found is None:
        raise ControlError(f"{order.command!r} is no command; these are: {', '.join(_COMMANDS)}")
    known = _OPTIONS.get(order.command, {})
    for name, value in order.options.items():
        if name not in known:
            raise ControlError(f"{order.command} has no option {name!r}")
        if not isinstance(value, known[name]):
            raise ControlError(
                f"option {name} of {order.command} is {value!r}; it must be a "
                f"{known[name].__name__}"
            )
    return found


def _status(actions: Actions, order: Order) -> Steps[dict[str, Any]]:  # noqa: ARG001
    yield from ()
    return _told(actions.stats())


def _attach(actions: Actions, order: Order) -> Steps[dict[str, Any]]:
    url = order.options.get("url", "")
    if "://" not in url:
        raise ConfigError(
            f"attach wants the URL of storage, such as file:///var/cache/kv, not {url!r}"
        )
    yield from actions.attach(url, timeout=order.timeout)
    return _told(actions.stats())


def _detach(actions: Actions, order: Order) -> Steps[dict[str, Any]]:
    forced = order.options.get("force", False)
    gone = yield from actions.detach(order.timeout, force=forced)
    return {"detached": gone, **_told(actions.stats())}


def _flush(actions: Actions, order: Order) -> Steps[dict[str, Any]]:
    report: FlushReport = yield from actions.flush(order.timeout)
    return dataclasses.asdict(report)


def _told(stats: TierStats) -> dict[str, Any]:
    told = dataclasses.asdict(stats)
    told["slots"] = {
        str(kind): {str(state): count for state, count in states.items()}
        for kind, states in stats.slots.items()
    }
    told["storage"] = str(stats.storage)
    return told


_COMMANDS: Mapping[str, _Command] = {
    "status": _status,
    "attach": _attach,
    "detach": _detach,
    "flush": _flush,
}
_OPTIONS: Mapping[str, Mapping[str, type]] = {"attach": {"url": str}, "detach": {"force": bool}}
