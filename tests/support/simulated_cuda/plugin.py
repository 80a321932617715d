"""`pytest -p tests.support.simulated_cuda.plugin`: the tests see a simulated CUDA device."""

from contextlib import ExitStack

import pytest

from tests.support.simulated_cuda.simulation import simulation, why_not

_STACK = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    if why_not() is None:
        _STACK.enter_context(simulation())


def pytest_unconfigure(config: pytest.Config) -> None:
    _STACK.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Not before the tests' hook that checks shapes: it would come too late for these modules.
    from pretrain import resources

    # The rate of a real device's products is measured with larger matrices.
    resources._LARGE_SIDE = 64
    if (reason := why_not()) is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))
