"""Entry point of the command `ssl-bench`."""

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
    """Run one command and return its exit code; `ssl_bench.errors` lists the codes."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    open_streams()
    let_threads_sleep()
    try:
        with handled(STOPPING, stop):
            code = run(arguments)
        # Flush here, because an error of a full disk could not be reported at exit.
        print(end="", flush=True)
        return code
    except KeyboardInterrupt as reason:
        return said_stopped(reason, arguments)
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe. Python would print an error at exit.
        sys.stdout = None
        return 0
    except Exception as error:
        code = None if "--debug" in arguments else reported(error, arguments)
        if code is None:
            raise
        return code


if __name__ == "__main__":
    sys.exit(main())
