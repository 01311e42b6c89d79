"""Stop before `make test` pulls a CUDA build of PyTorch: what pip would install is searched for NVIDIA's wheels."""

import json
import sys
from pathlib import Path


def main(report: str) -> int:
    """1 where the report of `pip install --dry-run` has packages of CUDA."""
    wanted = [p["metadata"]["name"] for p in json.loads(Path(report).read_text())["install"]]
    cuda = [name for name in wanted if name.startswith(("nvidia-", "cuda-"))]
    if cuda:
        print(f"pip would install a CUDA build of PyTorch ({len(cuda)} packages, {cuda[0]} first), some gigabytes.")
        print("Tests need its CPU build: install that into .venv from the index that pytorch.org names, or set")
        print("PIP_EXTRA_INDEX_URL to it, then try again; CUDA=1 goes on all the same.")
    return bool(cuda)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
