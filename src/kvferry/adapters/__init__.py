"""One module an engine, imported by its full name: `kvferry.adapters.transformers`.

Nothing is loaded here: an adapter needs its engine installed, and you have one of them.
"""

from __future__ import annotations

__all__: list[str] = []
