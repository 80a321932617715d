"""`python -m ssl_bench`, as `torchrun -m ssl_bench` starts it: the command `ssl-bench`."""

import sys

from ssl_bench.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
