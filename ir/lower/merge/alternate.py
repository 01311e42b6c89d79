"""Members take turns: compute changes member at each communication."""

from collections.abc import Callable, Sequence

Item = tuple[int, int]  # (node, member)


def alternate(
    members: Sequence[Sequence[int]], is_comm: Callable[[int], bool], is_weight: Callable[[int], bool]
) -> list[Item]:
    """Take turns: compute changes member at each communication, so that one's wire is beside the other's compute.

    Chains keep their order; leading communication goes first; the first turn is the member's whose first op is
    compute. A W that follows the communication its I feeds belongs to the same turn: it needs nothing from the wire.

    >>> comm, w = {1, 4}.__contains__, set().__contains__
    >>> alternate([(0, 1, 2), (3, 4, 5)], comm, w)
    [(0, 0), (1, 0), (3, 1), (4, 1), (2, 0), (5, 1)]
    """
    at = [0] * len(members)
    out: list[Item] = []

    def take(m: int) -> int:
        node = members[m][at[m]]
        at[m] += 1
        out.append((node, m))
        return node

    leading = [bool(seq) and is_comm(seq[0]) for seq in members]
    for m, seq in enumerate(members):
        while at[m] < len(seq) and is_comm(seq[at[m]]):
            take(m)
    turn = leading.index(False) if False in leading else 0
    while any(at[m] < len(seq) for m, seq in enumerate(members)):
        seq = members[turn]
        while at[turn] < len(seq):
            if is_comm(take(turn)):
                while at[turn] < len(seq) and (is_comm(seq[at[turn]]) or is_weight(seq[at[turn]])):
                    take(turn)
                break
        turn = (turn + 1) % len(members)
    return out


def delayed(chain: Sequence[int], is_comm: Callable[[int], bool], is_weight: Callable[[int], bool]) -> list[int]:
    """Every W behind the next communication of its chain, so that the wire is busy before what nobody waits for.

    >>> delayed([0, 1, 2, 3, 4], is_comm={2}.__contains__, is_weight={1, 4}.__contains__)
    [0, 2, 1, 3, 4]
    """
    out: list[int] = []
    late: list[int] = []
    for node in chain:
        if is_weight(node):
            late.append(node)
            continue
        if late and out and is_comm(out[-1]) and not is_comm(node):
            out += late
            late.clear()
        out.append(node)
    return out + late
