"""`python -m piper_sim`: the command `piper-sim`, where scripts are not on the path.

What the user's folder holds is no library of ours: see `executor.__main__`.
"""

import os
import sys

if not sys.flags.safe_path and not os.path.samefile(sys.path[0] or ".", os.path.dirname(os.path.dirname(__file__))):
    sys.path.append(sys.path.pop(0))

from piper_sim.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
