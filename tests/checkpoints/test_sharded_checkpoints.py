"""Checkpoints of which each rank writes its part: whole or not there, for any number of ranks and any engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forks import free_port, start_forked
from running import run, train_overrides
from s3_fixtures import Bucket
from services.fault_proxy import Fault
from test_saver import DRAFT, FULL, Rejecting, left
from torch import nn

from train.checkpoints.loader import fitting, read_optimizer, read_weights
from train.checkpoints.manifest import FILE, Manifest, Progress, Untrusted
from train.checkpoints.saver import AsyncSaver
from train.checkpoints.store import LocalStore
from train.checkpoints.store_s3 import S3Store
from train.config import BackendConfig, CheckpointConfig
from train.parallel.ddp import DDP
from train.parallel.engines import Engine
from train.parallel.pieces import piece
from train.run_folder.metrics_files import rows
from train.storage.schema import FileName

SPLIT = ["model.architecture=bert", "model.embedding_size=null", "parallel=fsdp"]


def test_in_s3_every_rank_uploads_its_part_and_a_save_that_lacks_one_is_none(
    bucket: Bucket, prepared, tmp_path
):
    """The first upload of rank 1 is rejected: the alarm names it. The next save removes what that one has left."""
    bucket.proxy.set(
        Fault("status", match="^PUT .*/model_00001.pt", times=1, code=403, error="AccessDenied")
    )
    location = bucket.location("run")
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    arguments = train_overrides(
        location, prepared, *SPLIT, "micro_batch_size=4", cache, *bucket.overrides()
    )
    done = run(arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    told = map(json.loads, rows(bucket.folder()))
    (fault,) = [line["reason"] for line in told if line["kind"] == "fault"]
    assert fault.startswith("checkpoint of step 3: InputError: s3://")
    assert "model_00001.pt" in fault and "whole in" not in fault
    store = S3Store(bucket.folder(), tmp_path / "staging")
    assert store.steps() == [6]
    third, sixth = (bucket.keys(f"run/checkpoints/step_{step:08d}/") for step in (3, 6))
    assert third == []
    assert sorted(key.rpartition("/")[2] for key in sixth) == sorted(
        [FILE, *store.manifest(6).files]
    )
    again = run(arguments, ranks=2)
    assert "resuming from the checkpoint of step 6" in again.stderr


class Divided(Engine):
    """Two rows of one weight, on a rank of its own each."""

    def check_replicas(self):
        """No row is on two ranks."""

    def state(self):
        rank = self.backend.world.rank
        rows = piece(self.model.weight.detach()[rank : rank + 1], rank, 2)
        own = {"state": {}, **({"param_groups": []} if rank == 0 else {})}
        return {"model": {"weight": rows}, "optimizer": own}


class Failing(Rejecting):
    """A disk that rejects a file, or all; or a rank that dies while it writes."""

    rejected = ""

    def begin(self, step, num_bytes):
        if self.rejected == "begin":
            raise FULL
        return super().begin(step, num_bytes)

    def join(self, *arguments):
        if self.rejected == "rank":
            os._exit(0)
        return super().join(*arguments)


FAULTS = {1: "", 2: "model_00001.pt", 3: "model.pt", 4: "begin", 5: "NaN", 6: "", 7: "rank"}


def main(folder):
    """One of two ranks: save at each step, with the fault of that step; rank 0 writes down what failed."""
    backend = DDP(BackendConfig(device="cpu", precision="fp32"))
    store = Failing(Path(folder) / "checkpoints")
    model = nn.Linear(2, 2, bias=False)
    run_folder = SimpleNamespace(
        ownership=SimpleNamespace(check=lambda: None), mirror=lambda: None
    )
    engine = Divided(backend, model, torch.optim.SGD(model.parameters()))
    saver = AsyncSaver(CheckpointConfig(keep=0), store, engine, backend, DRAFT, run_folder)
    failures = []
    for step, store.rejected in FAULTS.items():
        model.weight.data.fill_(
            float("nan" if store.rejected == "NaN" and backend.world.rank == 1 else step)
        )
        saver.save(Progress(step=step), {}, metric=None, must=store.rejected != "rank")
        failures.append(getattr(saver.pending.result(), "failure", None))
    (Path(folder) / "failures.json").write_text(json.dumps([failures, store.steps(), left(store)]))
    os._exit(0)  # the group has lost a rank


def test_a_save_lacks_no_part_whichever_rank_fails(tmp_path):
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    env |= {
        "LOCAL_WORLD_SIZE": "2",
        "PYTHONPATH": f"{Path(__file__).parent.parent}:{Path(__file__).parent}",
    }
    # without torchrun, which would end rank 0 for rank 1
    ranks = [
        start_forked(
            [Path(__file__).stem, str(tmp_path)], {**env, "RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in "01"
    ]
    for process in ranks:
        process.join()
    failures, steps, remains = json.loads((tmp_path / "failures.json").read_text())
    assert (steps, remains) == ([1, 6], [])
    full = "OSError: [Errno 28] No space left on device"
    no_number = "FloatingPointError: weights.weight.rows contains NaN or infinity; such a state is not saved"
    assert failures[:6] == [
        None,
        f"RuntimeError: rank 1: {full}",
        full,
        full,
        no_number,
        None,
    ]
    # reset, or closed by peer
    assert failures[6].startswith("RuntimeError: ") and "Connection" in failures[6]
    store = LocalStore(tmp_path / "checkpoints")
    for step in steps:
        assert torch.equal(
            read_weights(store.fetch(step), store.manifest(step))["weight"],
            torch.full((2, 2), float(step)),
        )


ROWS = torch.arange(6.0).reshape(3, 2)


def rejected(folder, contents, read):
    """The rejection of a step with these files, whose checksums are right."""
    files = {}
    for name, content in contents.items():
        torch.save(content, folder / name)
        files[FileName(name)] = {"bytes": (folder / name).stat().st_size, "sha256": "0" * 64}
    with pytest.raises(Untrusted, match="who wrote it$") as rejection, fitting(folder):
        dict(read(folder, Manifest(1, 1, {}, {}, {}, 2, "ddp", None, files=files)))
    assert "\n" not in str(rejection.value)
    return str(rejection.value)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            piece(ROWS[2:], 2, 3),
            "model_00001.pt: 'w' has rows from 2, but the previous rows end at 1",
        ),
        (piece(ROWS, 0, 3), "'w' has rows from 0, but the previous rows end at 1"),
        (piece(torch.cat([ROWS, ROWS]), 1, 3), "'w' ends at row 7 of 3"),
        (piece(ROWS[1:2], 1, 3), "'w' ends at row 2 of 3"),
        (
            piece(ROWS[1:], 1, 4),
            "model_00001.pt: 'w' differs in shape or dtype",
        ),
        (piece(ROWS[1:], True, 3), "model_00001.pt: 'w'.first_row is True, not a count"),
        (piece(ROWS[0, 0], 1, 3), "model_00001.pt: 'w' holds tensor(0.), not rows"),
        (5, "model_00001.pt: 'w' is 5, not an object"),
        (ROWS, "model_00001.pt: 'w' is also in another file"),
    ],
)
def test_pieces_that_do_not_make_a_tensor_are_rejected(tmp_path, second, message):
    contents = {"model.pt": {"w": piece(ROWS[:1], 0, 3)}, "model_00001.pt": {"w": second}}
    assert message in rejected(tmp_path, contents, read_weights)


@pytest.mark.parametrize(
    "strange",
    [
        ROWS.to_sparse(),
        ROWS.to_sparse_csr(),
        torch.quantize_per_tensor(ROWS, 0.1, 0, torch.qint8),
        torch.nested.as_nested_tensor([ROWS, ROWS[:1]]),
        ROWS.to("meta"),
        torch.nn.Parameter(ROWS),
    ],
    ids=["sparse", "CSR", "quantised", "nested", "meta", "a subclass"],
)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|TypedStorage|quantize).*")
def test_tensors_that_are_not_plain_numbers_are_rejected(tmp_path, strange):
    inside = [{"deep": (strange,)}]
    inside.append(inside)  # pickle allows it
    assert "a tensor that is not plain numbers" in rejected(
        tmp_path, {"model.pt": {"w": inside}}, read_weights
    )


def test_a_part_that_is_none_or_lacks_moments_is_rejected(tmp_path):
    assert "model_00001.pt: it holds 5" in rejected(
        tmp_path, {"model.pt": {}, "model_00001.pt": 5}, read_weights
    )
    first = {"state": {0: {"m": ROWS}}, "param_groups": [{"params": [0, 1]}]}
    contents = {"optimizer.pt": first, "optimizer_00001.pt": {"state": {}}}
    assert "optimizer_00001.pt: no moments of parameter 1" in rejected(
        tmp_path, contents, read_optimizer
    )
    contents["optimizer_00001.pt"] = {"state": {0: {"m": ROWS}, 1: {"m": ROWS}}}
    assert "'m' is also in another file" in rejected(tmp_path, contents, read_optimizer)


if __name__ == "__main__":
    main(*sys.argv[1:])
