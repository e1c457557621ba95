"""Plans, and the engine that carries them out."""

from kvferry.transfer.captured_transfer import CapturedTransfer
from kvferry.transfer.engine import TransferEngine
from kvferry.transfer.handle import CompletedTransfer, TransferHandle
from kvferry.transfer.host_pages import HostPages
from kvferry.transfer.indices import DeviceRows, blocks_to_rows
from kvferry.transfer.paths import (
    available_cpu_paths,
    available_gpu_paths,
    disabled_gpu_paths,
)
from kvferry.transfer.plan import TransferPlan

__all__ = [
    "CapturedTransfer",
    "CompletedTransfer",
    "DeviceRows",
    "HostPages",
    "TransferEngine",
    "TransferHandle",
    "TransferPlan",
    "available_cpu_paths",
    "available_gpu_paths",
    "blocks_to_rows",
    "disabled_gpu_paths",
]
