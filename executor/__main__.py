"""`torchrun --nproc-per-node N -m executor JOB --steps K`: see `executor.launch.torchrun`.

`python -m` looks for modules in the working directory first. That is the user's: files there called `queue.py` or
`numpy.py` are neither Python's nor numpy, and `ir/` is not ours. It comes last, unless we live there.
"""

import os
import sys

if not sys.flags.safe_path and not os.path.samefile(sys.path[0] or ".", os.path.dirname(os.path.dirname(__file__))):
    sys.path.append(sys.path.pop(0))

from executor.launch.torchrun import end, main

if __name__ == "__main__":
    end(main(sys.argv[1:]))
