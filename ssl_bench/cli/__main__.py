"""The command `ssl-bench`: its exit code, and what is said when it ends early."""

import sys
from collections.abc import Sequence

from ssl_bench.cli.parser import run
from ssl_bench.system.endings import (
    STOP_SIGNALS,
    handle_signals,
    raise_stop_signal,
    repair_standard_streams,
    report_error,
    report_interruption,
)
from ssl_bench.system.process import use_passive_openmp_waiting


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit codes are those of `ssl_bench.errors`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    repair_standard_streams()
    use_passive_openmp_waiting()
    try:
        with handle_signals(STOP_SIGNALS, raise_stop_signal):
            code = run(arguments)
        # Here a full disk can still be said; Python itself would only complain while it ends.
        print(end="", flush=True)
        return code
    except KeyboardInterrupt as reason:
        return report_interruption(reason, arguments)
    except BrokenPipeError:
        # The reader (such as `head`) has seen enough; Python would complain while closing stdout.
        sys.stdout = None
        return 0
    except Exception as error:
        code = None if "--debug" in arguments else report_error(error, arguments)
        if code is None:
            raise
        return code


if __name__ == "__main__":
    sys.exit(main())
