"""Plans, and the engine that carries them out."""

from kvferry.transfer.engine import TransferEngine
from kvferry.transfer.handle import CompletedTransfer, TransferHandle
from kvferry.transfer.host_pages import HostPages
from kvferry.transfer.paths import available_cpu_paths, available_gpu_paths
from kvferry.transfer.plan import TransferPlan, blocks_to_rows

__all__ = [
    "CompletedTransfer",
    "HostPages",
    "TransferEngine",
    "TransferHandle",
    "TransferPlan",
    "available_cpu_paths",
    "available_gpu_paths",
    "blocks_to_rows",
]
