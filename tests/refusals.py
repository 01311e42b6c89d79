"""What is refused, and how."""

from collections.abc import Callable

import pytest

from ir.core.errors import PiperError


def refused(ask: Callable[[], object]) -> PiperError:
    """The error that this ends in."""
    with pytest.raises(PiperError) as caught:
        ask()
    return caught.value
