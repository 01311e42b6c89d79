"""The five directives: place, replicate, shard, split, order. Each a frozen value that maps Graph to Graph."""

from ir.directives.place import OrderDirective, PlaceDirective, SplitDirective
from ir.directives.replicate import ReplicateDirective
from ir.directives.shard import ShardDirective
from ir.directives.strategy import Directive, apply

__all__ = [
    "Directive",
    "OrderDirective",
    "PlaceDirective",
    "ReplicateDirective",
    "ShardDirective",
    "SplitDirective",
    "apply",
]
