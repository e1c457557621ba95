"""Everything kvferry raises, as one tree.

Expected outcomes (a miss, a full pool, a refused page) are values and never appear here. What is
raised means a broken contract or a broken machine, and every message says the value that was
found, the limit it broke and what to do next.

    KVFerryError
    ├── GeometryError (ValueError)          planes that do not describe a cache
    │   └── UnknownArchitectureError        a model config kvferry cannot read
    ├── ViewError (ValueError)              a tensor that does not fit its plane or its storage
    ├── PlanError (ValueError)              indices, planes or layers of a transfer are wrong
    ├── PageKeyError (ValueError)           tokens or a namespace that no page key can be made from
    ├── PrefixIndexError                    the prefix index was misused, or does not add up
    ├── HostMemoryError
    │   ├── BudgetError (MemoryError)       more host memory was asked for than there is
    │   ├── SlotOwnershipError              a slot was freed twice, or by somebody else
    │   ├── PinError                        memory could not be registered, or is not registered
    │   ├── PoolInUseError                  a pool was closed while a transfer uses it
    │   └── PoolClosedError                 a pool was used after it was closed
    ├── TransferError
    │   ├── TransferFaultError              a copy failed while it ran
    │   └── TransferTimeoutError (TimeoutError)
    ├── RankError                           ranks could not agree: one is dead, broken or gave up
    │   ├── RankMismatchError               ranks made different calls
    │   └── RankTimeoutError (TimeoutError) a rank did not come in time
    ├── JITError
    │   ├── KernelSourceError               a kernel's text, header or option is not as it must be
    │   ├── CompileError                    the compiler refused a kernel
    │   ├── CompilerVersionError            the compiler that opens is not the one installed
    │   └── CubinCacheError                 the folder for compiled kernels cannot be trusted
    ├── DriverError
    │   ├── NoDeviceError                   there is no driver, or no such GPU
    │   ├── DriverTooOldError               the driver cannot run what it is given
    │   └── LaunchError                     the driver refused to start a kernel
    ├── StorageError                        a storage backend cannot be opened, or is misused
    │   └── BackendInterfaceError (TypeError)  a class lacks what a storage backend must have
    ├── TraceError (ValueError)             a trace of requests that cannot be replayed
    ├── CacheError                          the cache was used after it was closed, or wrongly
    │   └── PageStateError                  a page would change its state as it must not
    ├── ControlError                        a control socket cannot be made, or gave no answer
    ├── ConfigError (ValueError)            an environment variable or option has a bad value
    ├── MetricsError (ValueError)           a figure that cannot have been measured, or a name twice
    └── MissingDependencyError (ImportError)  an optional package is not installed
"""

from __future__ import annotations

__all__ = [
    "BackendInterfaceError",
    "BudgetError",
    "CacheError",
    "CompileError",
    "CompilerVersionError",
    "ConfigError",
    "ControlError",
    "CubinCacheError",
    "DriverError",
    "DriverTooOldError",
    "GeometryError",
    "HostMemoryError",
    "JITError",
    "KVFerryError",
    "KernelSourceError",
    "LaunchError",
    "MetricsError",
    "MissingDependencyError",
    "NoDeviceError",
    "PageKeyError",
    "PageStateError",
    "PinError",
    "PlanError",
    "PoolClosedError",
    "PoolInUseError",
    "PrefixIndexError",
    "RankError",
    "RankMismatchError",
    "RankTimeoutError",
    "SlotOwnershipError",
    "StorageError",
    "TraceError",
    "TransferError",
    "TransferFaultError",
    "TransferTimeoutError",
    "UnknownArchitectureError",
    "ViewError",
]


class KVFerryError(Exception):
    """The root of everything kvferry raises on purpose."""


class GeometryError(KVFerryError, ValueError):
    """Planes, sizes or alignments that cannot describe a cache."""


class UnknownArchitectureError(GeometryError):
    """A model config that kvferry has no rule for; the message says how to give planes by hand."""


class ViewError(KVFerryError, ValueError):
    """A tensor that does not fit its plane, or whose strides do not fit its storage."""


class PlanError(KVFerryError, ValueError):
    """Indices, planes, layers or page keys of a transfer that cannot be carried out."""


class PageKeyError(KVFerryError, ValueError):
    """Tokens, content spans or a namespace that no page key can be made from."""


class PrefixIndexError(KVFerryError):
    """A node, slot or pin that the prefix index does not have, or an index that does not add up."""


class HostMemoryError(KVFerryError):
    """Host memory could not be had, or a page slot was misused."""


class BudgetError(HostMemoryError, MemoryError):
    """More host memory was asked for than the machine, the cgroup or the lock limit allows."""


class SlotOwnershipError(HostMemoryError):
    """A page slot was freed twice, or handed on by somebody who does not own it."""


class PinError(HostMemoryError):
    """Host memory that a GPU should reach is not registered, could not be, or cannot be let go."""


class PoolInUseError(HostMemoryError):
    """A pool was closed while a transfer still reads or writes it."""


class PoolClosedError(HostMemoryError):
    """A pool was used after it had been closed."""


class TransferError(KVFerryError):
    """A transfer did not end as it should."""


class TransferFaultError(TransferError):
    """A copy failed while it ran; none of its pages may be used."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A wait reached its deadline; the transfer itself goes on."""


class RankError(KVFerryError):
    """Ranks could not agree: one is dead, has closed or gave up. They are broken from then on."""


class RankMismatchError(RankError):
    """Ranks made different calls, or brought different numbers of values; all of them raise it."""


class RankTimeoutError(RankError, TimeoutError):
    """A rank did not come before the deadline."""


class JITError(KVFerryError):
    """A kernel could not be built."""


class KernelSourceError(JITError):
    """A kernel's source, header, define or target is missing or malformed."""


class CompileError(JITError):
    """The compiler refused a kernel; the message has its log, the target and the options."""


class CompilerVersionError(JITError):
    """The compiler that the process opened is not the one that the installed package names."""


class CubinCacheError(JITError):
    """Others may write the folder for compiled kernels, so nothing in it may be run."""


class DriverError(KVFerryError):
    """The CUDA driver refused a call.

    Attributes:
        code: the driver's number for it (a `CUresult`), 0 where the driver was not asked.
    """

    code: int = 0


class NoDeviceError(DriverError):
    """There is no NVIDIA driver here, or it has no such GPU."""


class DriverTooOldError(DriverError):
    """The driver is older than a kernel, a binding or an entry point needs."""


class LaunchError(DriverError):
    """The driver refused to start a kernel, or reported an earlier kernel's failure instead."""


class TraceError(KVFerryError, ValueError):
    """A trace that cannot be read, or in which a line is no request; the message has its number."""


class StorageError(KVFerryError):
    """A storage backend cannot be opened, or was called with arguments that do not fit together.

    What happens to a single object (a miss, damage, a full disk) is an `ItemResult`, never this.
    """


class BackendInterfaceError(StorageError, TypeError):
    """A class cannot serve as a storage backend; the message names what it lacks."""


class CacheError(KVFerryError):
    """The cache was used after it was closed, or in an order that makes no sense."""


class PageStateError(CacheError):
    """A page would change its state in a way that the table of transitions does not have.

    Nothing has changed. It means a defect in kvferry, not in its caller.
    """


class ControlError(KVFerryError):
    """A control socket cannot be made, nobody answers at it, or a message is none."""


class ConfigError(KVFerryError, ValueError):
    """An environment variable or an option has a value that kvferry does not accept.

    Attributes:
        settings: what it is about, as ``section.field``; empty where no setting of the config is.
    """

    settings: tuple[str, ...] = ()


class MetricsError(KVFerryError, ValueError):
    """A figure that cannot have been measured, or a metric that the registry has already."""


class MissingDependencyError(KVFerryError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""
