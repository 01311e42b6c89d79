"""`torchrun --nproc-per-node N -m executor JOB --steps K`: see `executor.torchrun`."""

import sys

from executor.torchrun import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
