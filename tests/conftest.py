"""A small corpus, prepared once for all tests; no test reaches a hub, an account or a launcher's environment."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from running import prepare_config, write_corpus
from services.machines import NOT_PERMITTED
from transformers import PreTrainedTokenizerFast

from train.data.text.tokenizer import train_tokenizer
from train.tools import prepare

pytest_plugins = """fake_cuda held launched launching machines_fixture s3_fixtures saved_steps slurm_fixtures
    streaming toy""".split()

# Autograd counts the devices at a process's first backward pass: that of XLA has to be open by then, for the tests that
# train both ways in this process. Its compiler takes a quarter of the time without optimising.
os.environ |= {
    "PJRT_DEVICE": "CPU",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
}
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
# So is this: torch.compile takes the processor's word for its vector instructions. Else every process compiles a
# program for each kind and loads it in a process of its own: a third of the time of a small graph.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
if importlib.util.find_spec("torch_xla") is not None:
    import torch_xla

    torch_xla.device()

# Tests that use one of these fixtures need a service, as all tests of the modules do whose names begin so.
# the last: a package index
SERVICE_FIXTURES = {
    "s3_server",
    "shared_slurm",
    "machines",
    "mlflow_server",
    "real_encoder",
}
SERVICE_MODULES = ("test_ec2_", "test_ami", "test_browser")
SLOWEST = """test_launch_local test_xla test_compiled test_docs test_fsdp test_ec2_machines test_ami_provision
    test_launch_slurm""".split()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-services",
        action="store_true",
        help="fail where something to test with is missing",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a service, and begin with the slowest modules, so that no worker ends with one of them alone."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & SERVICE_FIXTURES or item.path.stem.startswith(SERVICE_MODULES):
            item.add_marker("services")
    places = {stem: place for place, stem in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # in a worker: the process that gathers their results judges
        return
    skipped = [
        report
        for report in reporter.stats.get("skipped", ())
        if NOT_PERMITTED not in str(report.longrepr)
    ]
    if session.config.getoption("--require-services") and skipped:
        reporter.write_line(
            f"\n{len(skipped)} skipped, which --require-services forbids", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="session")
def quiet_world(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    # as in a shell's background; children would inherit it
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # as in the processes that tests start: sums of floats are the same there
    torch.set_num_threads(1)


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What the logger of runs has said in this test."""
    # a run in this process may have turned it off
    monkeypatch.setattr(logging.getLogger("train"), "propagate", True)
    caplog.set_level(logging.INFO, "train")
    return caplog


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="session")
def texts(corpus: Path) -> list[str]:
    """Its sentences."""
    return [line for line in corpus.read_text().splitlines() if line]


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    return train_tokenizer(texts, vocab_size=120, lowercase=True, train_bytes=10**6)


@pytest.fixture(scope="session")
def tokenizer_folder(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A prepared data set of some 200 sequences. Tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare.prepare(prepare_config(folder, corpus))
    return folder
