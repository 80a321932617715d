"""The command `ssl-bench`: its exit code, and what is said when it ends early."""

import sys
from collections.abc import Sequence

from ssl_bench.cli.parser import run
from ssl_bench.system.endings import (
    STOPPING,
    handled,
    open_streams,
    reported,
    said_stopped,
    stop,
)
from ssl_bench.system.launch import let_threads_sleep


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit codes are those of `ssl_bench.errors`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    open_streams()
    let_threads_sleep()
    try:
        with handled(STOPPING, stop):
            code = run(arguments)
        # Here a full disk can still be said; Python itself would only complain while it ends.
        print(end="", flush=True)
        return code
    except KeyboardInterrupt as reason:
        return said_stopped(reason, arguments)
    except BrokenPipeError:
        # The reader (such as `head`) has seen enough; Python would complain while closing stdout.
        sys.stdout = None
        return 0
    except Exception as error:
        code = None if "--debug" in arguments else reported(error, arguments)
        if code is None:
            raise
        return code


if __name__ == "__main__":
    sys.exit(main())
