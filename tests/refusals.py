"""What is refused, and how."""

from collections.abc import Callable

import pytest

from ir.core.errors import PiperError


def refusal(ask: Callable[..., object], *args: object, match: str | None = None, **named: object) -> PiperError:
    """The error that `ask` of these arguments ends in. match: in its text."""
    with pytest.raises(PiperError, match=match) as caught:
        ask(*args, **named)
    return caught.value
