"""python -m experiments.joint trace | pairs | paper | fair | breakeven | executed: published figures beside ours."""

import argparse

from experiments.joint import breakeven, executed, fair, pairs, paper, trace


def main() -> None:
    """Print one experiment's rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    sub = parser.add_subparsers(dest="what", required=True)
    sub.add_parser("trace", help=trace.__doc__)
    sub.add_parser("pairs", help=pairs.__doc__)
    sub.add_parser("paper", help=paper.__doc__)
    many = sub.add_parser("fair", help=fair.__doc__)
    many.add_argument("--microbatches", type=int, default=120)
    many.add_argument("--wire", type=float, default=1.0)
    even = sub.add_parser("breakeven", help=breakeven.__doc__)
    even.add_argument("--out", required=True)
    even.add_argument("--force", action="store_true")
    runs = sub.add_parser("executed", help=executed.__doc__)
    runs.add_argument("--pp", type=int, default=4)
    runs.add_argument("--layer", type=float, default=0.02)
    runs.add_argument("--exchange", type=float, default=0.01)
    runs.add_argument("--backend", choices=("gloo", "local"), default="gloo")
    args = parser.parse_args()
    if args.what == "fair":
        for label, found in fair.rows(args.microbatches, args.wire):
            figures = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
            print(f"{label:48}", *figures, sep="  ", flush=True)
        return
    if args.what == "breakeven":
        breakeven.write(args.out, args.force)
        return
    ours_run = args.what == "executed"
    plain = {"trace": trace.rows, "pairs": pairs.rows, "paper": paper.rows}
    rows = executed.rows(args.pp, args.layer, args.exchange, args.backend) if ours_run else plain[args.what]()
    print(f"{'':52} {'measured' if ours_run else 'published':>10} {'ours':>9} {'off':>7}")
    for label, theirs, ours in rows:
        off = f"{ours / theirs - 1:+7.1%}" if theirs == theirs else ""  # nothing was published
        print(f"{label:52} {theirs:10.3f} {ours:9.3f} {off}".replace(" nan", "   -"), flush=True)


if __name__ == "__main__":
    main()
