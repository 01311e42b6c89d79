"""What is worked out of a plan once and kept as long as the plan is: jobs that differ in costs alone share a plan."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ir.plan.plan import Plan

_More = ParamSpec("_More")
_Found = TypeVar("_Found")
MOST_ANSWERS = 8  # of one plan


def once_per_plan(function: Callable[Concatenate[Plan, _More], _Found]) -> Callable[Concatenate[Plan, _More], _Found]:
    """A function of a plan and of hashable values that is asked once for each. Nobody may change what it gives.

    What it gives must not hold the plan, which would then never go.
    """
    kept: WeakKeyDictionary[Plan, dict[object, _Found]] = WeakKeyDictionary()

    @wraps(function)
    def once(plan: Plan, /, *more: _More.args, **named: _More.kwargs) -> _Found:
        known = kept.setdefault(plan, {})
        key = (more, tuple(named.items()))
        if key not in known:
            if len(known) >= MOST_ANSWERS:
                known.pop(next(iter(known)))
            known[key] = function(plan, *more, **named)
        return known[key]

    return once
