"""Graphs that were traced on the host, to run on another device."""

from typing import Any

import torch
from torch import fx, nn


def place(unit: nn.Module, device: torch.device) -> None:
    """Have every graph inside make its tensors on `device`: a trace wrote down the host's, ranges and masks of it too.

    Parameters and buffers are moved by whoever holds them.

    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.arange(4, device=x.device)
    >>> net = torch.export.export(Net(), (torch.ones(4),)).module()
    >>> place(net, torch.device("meta")); net(torch.ones(4, device="meta")).device
    device(type='meta')
    """

    def there(arg: Any) -> Any:
        return device if isinstance(arg, torch.device) else arg

    for module in unit.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            node.args, node.kwargs = fx.node.map_aggregate(node.args, there), fx.node.map_aggregate(node.kwargs, there)
        module.recompile()
