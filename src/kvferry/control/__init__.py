"""Orders to a process that runs, by its owner, over a Unix socket: `ControlSocket` and `ask`.

What the orders mean is for those who carry them out; see `kvferry.cache`.
"""

from __future__ import annotations

from kvferry.control.client import ask
from kvferry.control.messages import Answer, Order
from kvferry.control.socket import ControlSocket, PendingOrder

__all__ = ["Answer", "ControlSocket", "Order", "PendingOrder", "ask"]
