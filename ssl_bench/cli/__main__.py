"""Entry point of `ssl-bench` and of `python -m ssl_bench.cli`."""

import sys

from ssl_bench.cli.parser import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
