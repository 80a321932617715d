"""A pytest plugin that simulates a CUDA device."""

from contextlib import ExitStack

import pytest

from tests.support.simulated_cuda.simulation import reason_to_skip, simulation

_STACK = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    if reason_to_skip() is None:
        _STACK.enter_context(simulation())


def pytest_unconfigure(config: pytest.Config) -> None:
    _STACK.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Imported here, because the hook that checks shapes must be installed first.
    from pretrain import resources

    # The larger matrices for a real device are slow on the host.
    resources._LARGE_SIDE = 64
    if (reason := reason_to_skip()) is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))
