"""The fixture of machines: three network namespaces for each module of tests that wants them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from services import machines as services
from services.machines import NOT_PERMITTED, Machines, three_machines


def skip_without(request: pytest.FixtureRequest, what: str, service: Any) -> None:
    """Skip a test of what this machine cannot have; if only packages are missing, fail where all are required."""
    if missing := service.missing_programs():
        reason = f"no {what} to test with ({', '.join(missing)} missing): apt-get install {' '.join(service.PACKAGES)}"
        if request.config.getoption("--require-services"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    if said := service.fault():
        pytest.skip(f"{NOT_PERMITTED}: {said}")


@pytest.fixture(scope="module")
def machines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machines]:
    skip_without(request, "machines", services)
    with three_machines(tmp_path_factory.mktemp("machines")) as made:
        yield made
