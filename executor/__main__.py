"""`torchrun --nproc-per-node N -m executor JOB --steps K`: see `executor.launch.torchrun`."""

import sys

from executor.launch.torchrun import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
