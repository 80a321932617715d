"""Run the command `ssl-bench` as `python -m ssl_bench` or `torchrun -m ssl_bench`."""

import sys

from ssl_bench.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
