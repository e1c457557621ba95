"""What a caller says of a prompt, and what of it is computed: in one piece each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sized
from typing import TYPE_CHECKING, Any

from kvferry.errors import PageKeyError
from kvferry.index import page_keys
from kvferry.tiers import DeviceSlots, check_whole

if TYPE_CHECKING:
    from kvferry.geometry import Geometry
    from kvferry.index import ContentSpan, Namespace

__all__ = ["Offer", "Prompt"]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Tokens, and all else that makes their KV differ."""

    tokens: Any
    lora: str | None = None
    """None: the namespace's; so with `salt`."""

    salt: str | None = None
    content: Iterable[ContentSpan] = ()

    @property
    def num_tokens(self) -> int:
        """How long it is. Raises PageKeyError for what has no length."""
        if not isinstance(self.tokens, Sized):
            raise PageKeyError(
                f"tokens are {type(self.tokens).__name__}; pass the ids of a prompt, from its "
                f"first token on"
            )
        return len(self.tokens)

    def namespace(self, of: Namespace) -> Namespace:
        """`of`, with what this prompt has of its own."""
        own = (("lora", self.lora), ("salt", self.salt))
        changes = {name: value for name, value in own if value is not None}
        return dataclasses.replace(of, **changes) if changes else of

    def keys(self, of: Namespace, page_size: int) -> list[bytes]:
        """The keys of its whole pages; raises as `page_keys`."""
        return page_keys(self.namespace(of), self.tokens, page_size, content=self.content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """What of a prompt is computed, and where it lies on the device."""

    device_slots: Any
    plane_slots: Mapping[str, Any] | None
    valid_tokens: int | None
    has_state: bool
    priority: int
    device_run: int
    stream: int | None

    def filled(self, prompt: Prompt) -> Prompt:
        """The part of `prompt` that is computed. Raises PlanError for no number of its tokens."""
        num_tokens = prompt.num_tokens
        if self.valid_tokens is None:
            return prompt
        valid = check_whole("valid_tokens", self.valid_tokens, num_tokens)
        return dataclasses.replace(prompt, tokens=prompt.tokens[:valid])

    def rows(self, geometry: Geometry) -> DeviceSlots:
        """Where its pages lie."""
        return DeviceSlots(
            geometry,
            self.device_slots,
            self.plane_slots,
            device_run=self.device_run,
            stream=self.stream,
        )
