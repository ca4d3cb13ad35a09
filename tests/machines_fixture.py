"""The fixture of machines: three network namespaces for each module of tests that wants them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from services.machines import NOT_PERMITTED, PACKAGES, Machines, fault, missing_programs, three_machines


@pytest.fixture(scope="module")
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    if missing := missing_programs():
        reason = f"no machines to test with ({', '.join(missing)} missing): apt-get install {' '.join(PACKAGES)}"
        if request.config.getoption("--require-services"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    if said := fault():
        pytest.skip(f"{NOT_PERMITTED}: {said}")
    with three_machines(tmp_path_factory.mktemp("machines")) as made:
        yield made
