"""One host copy for the ranks of a machine whose bytes are the same: a keeper, and its peers.

The keeper has index, policies, storage and the memory; peers map that memory and load from it.
"""

from __future__ import annotations

from kvferry.sharing.joined_host import JoinedHost
from kvferry.sharing.shared_host import PeerState, SharedHost
from kvferry.sharing.shared_plane import SharedDataPlane

__all__ = ["JoinedHost", "PeerState", "SharedDataPlane", "SharedHost"]
