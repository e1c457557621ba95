"""The direct mover's calls of the driver from compiled code."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.kernels import (
    DRIVER_FUNCTIONS,
    DirectArgs,
    LaunchArgs,
    LaunchesArgs,
    SubmitStep,
    fields_of,
    submit_direct,
)
from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.errors import DriverError
    from kvferry.kernels.jit import Context, Event, Stream
    from kvferry.transfer.arrivals import Arrivals, StepMarks
    from kvferry.transfer.command_buffer import CommandBuffer
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.span_launcher import SpanLauncher
    from kvferry.transfer.span_table import SpanTable

__all__ = ["CompiledDirect"]

_MAX_LAYOUTS = 64


class _Layout(NamedTuple):
    """What is the same in every transfer by one table one way."""

    steps: ctypes.Array[LaunchesArgs]
    kept: tuple[Any, ...]
    """What the steps point to, and the table that the layout is known by."""


class CompiledDirect:
    """Puts direct transfers into their stream as `DirectMover` does, in one call each.

    The context must be current for every call, and one thread at a time may make one.

    Args:
        library: The compiled code.
        context: Of the GPU.
        launcher: Of the mover's engine.

    Raises:
        DriverTooOldError: The driver lacks one of the functions.
    """

    def __init__(self, library: ctypes.CDLL, context: Context, launcher: SpanLauncher) -> None:
        self._library = library
        self._driver = context.driver
        self._launcher = launcher
        self._layouts: dict[tuple[int, Direction], _Layout] = {}
        self._told = DirectArgs(
            launch=self._driver.entry_point(*DRIVER_FUNCTIONS["launch"]),
            record=self._driver.entry_point(*DRIVER_FUNCTIONS["record"]),
            fields=fields_of(launcher.transfer),
        )

    def launch(
        self,
        plan: TransferPlan,
        table: SpanTable,
        commands: CommandBuffer,
        kernels: Stream,
        arrivals: Arrivals,
    ) -> None:
        """As `DirectMover.launch`.

        Raises:
            DriverError: The driver refused, or earlier work has failed; what was enqueued before
                that stays.
        """
        layout, told = self._layout(table, plan.direction), self._told
        told.stream = int(kernels.handle)
        told.steps, told.num_steps = ctypes.addressof(layout.steps), len(layout.steps)
        told.num_pages = plan.num_pages
        self._launcher.begin(plan, table, commands)
        marks = arrivals.marks([step.layers for step in table.steps])
        num_recorded = 0
        try:
            told.reached = marks.address
            status = submit_direct(self._library, told)
            num_recorded = told.num_reached
            if status:
                raise self._refused(told, status, marks)
        finally:
            marks.settle(num_recorded)

    def _layout(self, table: SpanTable, direction: Direction) -> _Layout:
        found = self._layouts.get((id(table), direction))
        if found is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            steps = (LaunchesArgs * len(table.steps))()
            arrays = []
            for step, told in zip(table.steps, steps, strict=True):
                launches = self._launcher.in_place(step, direction is Direction.LOAD)
                of_step = (LaunchArgs * len(launches))(*launches)
                arrays.append(of_step)
                told.launches, told.num_launches = ctypes.addressof(of_step), len(of_step)
            # With its table, so that no other gets its id meanwhile.
            found = self._layouts[id(table), direction] = _Layout(steps, (*arrays, table))
        return found

    def _refused(self, told: DirectArgs, status: int, marks: StepMarks) -> DriverError:
        code = self._driver.bindings.CUresult(status)
        if SubmitStep(told.step) is SubmitStep.LAUNCH:
            return self._launcher.refused(LaunchArgs.from_address(told.detail), code)
        refusing: Event = marks.events[told.num_reached]
        return refusing.not_recorded(code)
