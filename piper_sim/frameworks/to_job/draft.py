"""A job in the making, out of what a launch states."""

from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]
EXPERTS = {"config", "num_experts", "num_local_experts", "n_routed_experts"}  # keys of a model that may have some


@dataclass
class JobDraft:
    """A job in the making. doubts: fact -> why the job says something else than the file. filled: key -> (value, why):
    what nobody stated. unsaid: what is presumed beside the job, though no argument asks for it. framework: whose rules.
    """

    framework: str
    job: dict[str, dict[str, Any]] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    filled: dict[str, tuple[object, str]] = field(default_factory=dict)
    unsaid: list[str] = field(default_factory=list)

    def put(self, section: str, **values: object) -> None:
        """Keys of a section; None says nothing."""
        found = {k: v for k, v in values.items() if v is not None}
        if found:
            self.job.setdefault(section, {}).update(found)

    def expect(self, holds: object, fact: str, why: str) -> None:
        """A doubt about a fact, unless it stands as the job has it."""
        if not holds:
            self.doubts[fact] = why

    def fill(self, key: str, value: object, why: str) -> None:
        """A key that nobody stated."""
        self.filled[key] = (value, why)
        section, _, name = key.partition(".")
        self.put(section, **{name: value})


def element_bytes(reduced: object) -> int:
    """Bytes of a gradient in a bucket, by the format that it is reduced in.

    >>> element_bytes("fp16"), element_bytes(None)
    (2, 4)
    """
    return 2 if reduced in ("bf16", "fp16") else 4


def has_experts(d: JobDraft, f: Facts) -> bool:
    """Whether the model has experts, or may have."""
    return bool(f.get("experts")) or bool(EXPERTS & set(d.job["model"]))
