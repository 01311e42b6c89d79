"""The five directives: place, replicate, shard, split, order. Each a frozen value that maps Graph to Graph."""

from ir.directives.order import OrderBy
from ir.directives.place import Place
from ir.directives.replicate import Replicate
from ir.directives.shard import Shard
from ir.directives.split import Split
from ir.directives.strategy import Directive, apply

__all__ = ["Directive", "OrderBy", "Place", "Replicate", "Shard", "Split", "apply"]
