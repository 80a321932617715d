"""Entry point of the command `ssl-bench`."""

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
    """Run one command and return its exit code; `ssl_bench.errors` lists the codes."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    repair_standard_streams()
    use_passive_openmp_waiting()
    try:
        with handle_signals(STOP_SIGNALS, raise_stop_signal):
            code = run(arguments)
        # Flush here, because an error of a full disk could not be reported at exit.
        print(end="", flush=True)
        return code
    except KeyboardInterrupt as reason:
        return report_interruption(reason, arguments)
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe. Python would print an error at exit.
        sys.stdout = None
        return 0
    except Exception as error:
        code = None if "--debug" in arguments else report_error(error, arguments)
        if code is None:
            raise
        return code


if __name__ == "__main__":
    sys.exit(main())
