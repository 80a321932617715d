"""Load the fixtures of all tests, except in the process that hands tests to the workers of xdist.

That process runs no test, and the imports would only delay the start of its workers.
"""

import os
import sys

starts_workers = any(word.startswith("-n") for word in sys.argv[1:])
if "PYTEST_XDIST_WORKER" in os.environ or not starts_workers:
    from tests.fixtures import *  # noqa: F403
