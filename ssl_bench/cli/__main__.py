"""The command `ssl-bench`: its exit code, and what is said when it ends early."""

import sys
from collections.abc import Sequence

from ssl_bench.cli.dispatch import run
from ssl_bench.errors import INTERRUPTED
from ssl_bench.system.endings import open_streams, reported
from ssl_bench.system.processors import let_threads_sleep
from ssl_bench.system.progress import is_heard


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit codes are those of `ssl_bench.errors`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    open_streams()
    let_threads_sleep()
    try:
        code = run(arguments)
        # Here a full disk can still be said; Python itself would only complain while it ends.
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        if is_heard():
            print("ssl-bench: interrupted; what was finished is saved", file=sys.stderr)
        return INTERRUPTED
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
