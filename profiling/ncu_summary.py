"""``python -m profiling.ncu_summary REPORT…``: the command ``ncu`` under the name by which it is asked for most."""

import sys

from profiling.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["ncu", *(sys.argv[1:] or ["--help"])]))
