"""What to install for a GPU: driver bindings and run-time compiler, from any package index."""

from __future__ import annotations

__all__ = ["PACKAGES", "install_line"]

PACKAGES: dict[int, tuple[str, ...]] = {
    12: ("cuda-bindings>=12.9,<13", "nvidia-cuda-nvrtc-cu12>=12.9,<13"),
    13: ("cuda-bindings==13.*", "nvidia-cuda-nvrtc==13.*"),
}
"""By the major version of CUDA; what the extras cuda12 and cuda13 bring."""


def install_line(cuda_major: int) -> str:
    """The command for a driver of CUDA `cuda_major`: the packages of it, or the nearest there are.

    It names the packages and not an extra of kvferry: it works wherever kvferry came from.
    """
    packages = PACKAGES[min(max(cuda_major, min(PACKAGES)), max(PACKAGES))]
    return f"pip install {' '.join(repr(package) for package in packages)}"
