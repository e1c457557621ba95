"""Profiles on disk, beside the compiled kernels: one file for each device, driver and link.

A file is written whole or not at all. One that is damaged, of another format or of another device
is passed over, and the reason is part of what `find_profile` returns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import stat
import time
from typing import TYPE_CHECKING

from kvferry import env
from kvferry.errors import ConfigError
from kvferry.kernels.jit import ROOT, complaint, others_may_write, publish_file, read_file
from kvferry.transfer.profile import BUILT_IN, DeviceProfile

if TYPE_CHECKING:
    from kvferry.kernels.jit import Context

__all__ = [
    "DeviceIdentity",
    "FoundProfile",
    "SavedProfile",
    "find_profile",
    "identify",
    "load_profile",
    "save_profile",
]

_SYSTEM = pathlib.Path("/sys")
_NO_FOLDER = "neither KVFERRY_CACHE_DIR nor XDG_CACHE_HOME nor HOME names a folder"
_NAME_BYTES = 256


@dataclasses.dataclass(frozen=True)
class DeviceIdentity:
    """What a profile is good for. A part that the system does not tell is empty."""

    name: str
    capability: tuple[int, int]
    cuda: tuple[int, int]
    """The newest CUDA that the driver runs."""
    driver: str
    """The driver's own release."""
    bus_id: str
    link: str
    """Speed and lanes that the device can have."""

    @property
    def file_name(self) -> str:
        """Of the profile's file: a hash, the same wherever the same device is."""
        told = json.dumps(dataclasses.asdict(self), sort_keys=True).encode()
        return f"profile-{hashlib.blake2b(told, digest_size=16).hexdigest()}.json"


@dataclasses.dataclass(frozen=True)
class FoundProfile:
    """The profile to use for a device."""

    profile: DeviceProfile
    path: pathlib.Path | None
    """Its file; None: it is the built-in one."""
    age_seconds: float | None
    """Since it was saved."""
    reason: str | None
    """Why it is the built-in one although there may be another; None: nobody calibrated yet, or
    it is calibrated."""


@dataclasses.dataclass(frozen=True)
class SavedProfile:
    """Where a profile went."""

    path: pathlib.Path | None
    """None: nowhere."""
    reason: str | None
    """Why nowhere, and what to do."""


def identify(context: Context, *, system: pathlib.Path = _SYSTEM) -> DeviceIdentity:
    """Which device `context` is of, as its driver and the `system`'s folder tell.

    Raises:
        DriverError: The driver does not answer.
    """
    driver = context.driver
    device = driver.call("cuDeviceGet", context.device)
    bus_id = context.bus_id
    # The speed of the moment is not asked for: an idle link slows down.
    folder = system / "bus/pci/devices" / bus_id
    link = [_line(folder / name) for name in ("max_link_speed", "max_link_width")]
    return DeviceIdentity(
        name=_text(driver.call("cuDeviceGetName", _NAME_BYTES, device)),
        capability=context.capability,
        cuda=driver.version,
        driver=_line(system / "module/nvidia/version"),
        bus_id=bus_id,
        link=" x".join(filter(None, link)),
    )


def load_profile(context: Context) -> DeviceProfile:
    """The profile of the GPU of `context`: the calibrated one, or the built-in one.

    Raises as `find_profile`, which also tells where it is from.
    """
    return find_profile(context).profile


def find_profile(context: Context) -> FoundProfile:
    """The profile to use for the GPU of `context`, and where it is from.

    Raises:
        ConfigError: KVFERRY_CACHE_DIR is no absolute path.
        DriverError: The driver does not answer.
    """
    folder = env.cache_folder().path
    if folder is None:
        return FoundProfile(BUILT_IN, None, None, reason=_NO_FOLDER)
    identity = identify(context)
    path = folder / identity.file_name
    try:
        if (distrust := _distrust(folder)) is not None:
            return FoundProfile(BUILT_IN, None, None, reason=distrust)
        data = read_file(path)
        saved_at = path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return FoundProfile(BUILT_IN, None, None, reason=None)
    except OSError as error:
        return FoundProfile(BUILT_IN, None, None, reason=complaint(path, error))
    try:
        profile = _unpack(data, identity)
    except ConfigError as bad:
        return FoundProfile(BUILT_IN, None, None, reason=f"{path}: {bad}")
    return FoundProfile(profile, path, max(0.0, time.time() - saved_at), reason=None)


def save_profile(context: Context, profile: DeviceProfile) -> SavedProfile:
    """Keep `profile` for the GPU of `context`, in place of what was kept before.

    A folder that cannot be written, or that others may write, is a value: nothing is saved there.

    Raises:
        ConfigError: KVFERRY_CACHE_DIR is no absolute path.
        DriverError: The driver does not answer.
    """
    folder = env.cache_folder().path
    if folder is None:
        return SavedProfile(None, f"{_NO_FOLDER}; set one of them")
    identity = identify(context)
    path = folder / identity.file_name
    told = {"device": dataclasses.asdict(identity), "profile": profile.to_dict()}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (distrust := _distrust(folder)) is not None:
            return SavedProfile(None, distrust)
        publish_file(path, json.dumps(told, indent=1).encode() + b"\n")
    except OSError as error:
        return SavedProfile(
            None,
            f"{complaint(path, error)}; let KVFERRY_CACHE_DIR name a folder that user "
            f"{os.geteuid()} can write",
        )
    return SavedProfile(path, None)


def _unpack(data: bytes | None, identity: DeviceIdentity) -> DeviceProfile:
    if data is None:
        raise ConfigError("it is no file; remove it and run kvferry calibrate")
    try:
        told = json.loads(data)
    except (ValueError, RecursionError) as bad:  # also text that is not UTF-8
        raise ConfigError(f"it is damaged ({bad}); run kvferry calibrate again") from bad
    if not isinstance(told, dict) or set(told) != {"device", "profile"}:
        raise ConfigError("it is no profile of kvferry's; run kvferry calibrate again")
    # As JSON has it: lists for tuples.
    if told["device"] != json.loads(json.dumps(dataclasses.asdict(identity))):
        raise ConfigError("it is of another device or driver; run kvferry calibrate here")
    return DeviceProfile.from_dict(told["profile"])


def _distrust(folder: pathlib.Path) -> str | None:
    """Why nothing in `folder` counts; the rule is that for compiled kernels. Raises OSError."""
    found = folder.stat()
    if not others_may_write(found, owners=(os.geteuid(), ROOT)):
        return None
    return (
        f"others may write in {folder} (mode {stat.S_IMODE(found.st_mode):o}, owner "
        f"{found.st_uid}): chown it to this user or root and chmod go-w it, or let "
        f"KVFERRY_CACHE_DIR name a folder of this user's own"
    )


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")


def _line(path: pathlib.Path) -> str:
    """What a file of the kernel's says; empty where there is none, or it may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
