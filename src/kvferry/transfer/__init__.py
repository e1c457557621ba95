"""Plans, and the engine that carries them out."""

from kvferry.transfer.calibration import Measured, calibrate
from kvferry.transfer.caller_stream import joined
from kvferry.transfer.captured_transfer import CapturedTransfer
from kvferry.transfer.engine import TransferEngine
from kvferry.transfer.handle import CompletedTransfer, TransferHandle
from kvferry.transfer.host_pages import HostPages
from kvferry.transfer.indices import DeviceRows, blocks_to_rows
from kvferry.transfer.paths import (
    available_cpu_paths,
    available_gpu_paths,
    check_environment,
    check_gpu_paths,
    disabled_gpu_paths,
    staging_is_disabled,
    why_no_gpu,
)
from kvferry.transfer.plan import TransferPlan
from kvferry.transfer.profile import BUILT_IN, DeviceProfile
from kvferry.transfer.profile_store import (
    FoundProfile,
    SavedProfile,
    find_profile,
    load_profile,
    save_profile,
)
from kvferry.transfer.route import growing_steps
from kvferry.transfer.route_preview import KernelUse, RoutePreview, preview_route
from kvferry.transfer.row_lists import RowList, check_rows, row_list
from kvferry.transfer.row_mover import RowMove, RowMover, RowOptions

__all__ = [
    "BUILT_IN",
    "CapturedTransfer",
    "CompletedTransfer",
    "DeviceProfile",
    "DeviceRows",
    "FoundProfile",
    "HostPages",
    "KernelUse",
    "Measured",
    "RoutePreview",
    "RowList",
    "RowMove",
    "RowMover",
    "RowOptions",
    "SavedProfile",
    "TransferEngine",
    "TransferHandle",
    "TransferPlan",
    "available_cpu_paths",
    "available_gpu_paths",
    "blocks_to_rows",
    "calibrate",
    "check_environment",
    "check_gpu_paths",
    "check_rows",
    "disabled_gpu_paths",
    "find_profile",
    "growing_steps",
    "joined",
    "load_profile",
    "preview_route",
    "row_list",
    "save_profile",
    "staging_is_disabled",
    "why_no_gpu",
]
