"""From a command line to a job: what is planned, what is rejected, and that every setting arrives as it was typed."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from ec2_launching import OWN as EC2
from ec2_launching import RUN
from planning import node, plan, script, with_module
from running import eventually
from torch.distributed.run import parse_args

from launch.__main__ import expect, main
from launch.plan import absolute, located
from launch.record import Job, Record
from launch.schedulers import scheduler
from train.config import S3Config, TrainConfig
from train.run import compose as cli
from train.run.command import DONE, REJECTED

OF_RUN = ["experiment=demo", "data.path=data/mine", "run_dir=runs/mine"]


# ---- what is planned -------------------------------------------------------------------------------------------------


def test_640_000_examples_on_n_machines():
    """Half the steps on twice the machines. The run knows the machine, for its MFU and its cost."""
    cfg, job = plan(
        ["cluster=slurm", "instance=p4d.24xlarge", "nodes=2"], ["experiment=albert_scaling"]
    )
    assert (job.nodes, job.processes_per_node, job.instance) == (2, 8, "p4d.24xlarge")
    run = cli.load_config(TrainConfig, job.overrides)
    assert run.instance == cfg.instance
    found = [expect(replace(cfg, nodes=nodes), run) for nodes in (2, 4)]
    assert [(each.world_size, each.steps) for each in found] == [(16, 2500), (32, 1250)]


def test_a_location_means_the_same_everywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    shown = [
        absolute(each)
        for each in ("runs/mine", "~/mine", "/runs/mine/", "file:///runs/mine", "s3://b/mine/")
    ]
    assert shown == [
        f"{tmp_path}/runs/mine",
        "/home/me/mine",
        "/runs/mine",
        "/runs/mine",
        "s3://b/mine",
    ]
    assert located(["run_dir=a", "seed=1", "run_dir=b"], "run_dir", "/b") == [
        "seed=1",
        'run_dir="/b"',
    ]


@pytest.mark.parametrize(
    ("own", "of_run", "says"),
    [
        (
            ["cluster.max_run_s=3600"],
            [],
            r"takes about 13.7 hours, and cluster\.max_run_s=3600 ends it after 1",
        ),
        ([], ["max_run_s=7200"], r"takes about 13.7 hours, and max_run_s=7200 ends it after 2"),
        (["cluster.max_run_s=86400"], [], None),
    ],
)
def test_a_plan_says_whether_the_run_will_finish_and_what_it_costs_at_most(
    capsys, own, of_run, says
):
    words = [*EC2, "instance=p5.48xlarge", "cluster.subnets=[subnet-a]", *own]
    # Neither S3 nor the Hub is asked.
    run = [
        "experiment=glue_bert",
        "model=any",
        "model.architecture=bert",
        *RUN[2:4],
        "max_epochs=null",
        "max_steps=10000000",
        *of_run,
    ]
    assert main([*words[:1], *words[2:], "--", *run]) == DONE
    out = " ".join(capsys.readouterr().out.split())
    assert (says is None) == ("NOT finish" not in out) and (
        says is None or re.search(says, out)
    ), out
    most = re.search(r"cost: at most \$([\d,]+):", out)
    is_part = "that is for a part of the run" in out
    assert most is not None and is_part == ("cluster.max_run_s=3600" in own)
    assert is_part or int(most[1].replace(",", "")) > 2 * 13.7 * 55.04


def test_a_plan_of_what_cannot_run_is_rejected_without_submitting(capsys):
    given = ["instance=p5.48xlarge", "cluster=slurm", "--", *OF_RUN, "global_batch_size=33"]
    assert main(given) == REJECTED
    out, err = capsys.readouterr()
    assert not out and "global_batch_size=33 cannot be split evenly over 8 ranks" in err


# ---- what is rejected ------------------------------------------------------------------------------------------------

SLURM = ["cluster=slurm", "nodes=2"]


def sbatch(argument: str) -> str:
    return f'cluster.sbatch_args=["{argument}"]'


# Settings of a run that name what only this computer has.
LOCAL = (
    ["data.path=/data/albert"],
    ["data.path=data/albert"],
    ["data.path=file:///a"],
    ["model.pretrained=./mine"],
    ["model.pretrained=../models/mine"],
)
CSV = ["experiment=glue_bert", "data=csv", *RUN[2:]]


def test_a_plan_for_slurm_needs_no_slurm_and_its_submission_does(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # as on a laptop
    assert main([*SLURM, "--", *OF_RUN]) == DONE
    assert "Not checked: its partition" in capsys.readouterr().out
    assert main([*SLURM, "submit=true", "--", *OF_RUN]) == REJECTED
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(said) == 1 and "is not on the PATH" in said[0]
    assert not list(tmp_path.iterdir())


def others(words: list[str]) -> list[str]:
    """The words without the machine type, which is typed once."""
    return [word for word in words if not word.startswith("instance=")]


@pytest.mark.parametrize(
    ("own", "of_run", "message"),
    [
        ([], [], "run_dir is not set"),
        (["instance=p9.9xlarge"], OF_RUN, "there is no such instance; choose one of: "),
        (["cluster=skypilot"], OF_RUN, "no such cluster; choose one of: ec2, local, slurm"),
        (
            ["cluster.sbatch_args=[]"],
            OF_RUN,
            "cluster.sbatch_args is not a setting of the cluster chosen here",
        ),
        ([], [*OF_RUN, "run_dir=runs/${oc.env:HOME}"], "references are not resolved"),
        (["nodes=2"], OF_RUN, "cluster=local uses only this machine, not 2; choose cluster=slurm"),
        (
            ["instance=trn1.32xlarge", "processes_per_node=16"],
            OF_RUN,
            "trn1.32xlarge runs 1 or 2 or 8 or 32",
        ),
        (
            ["instance=p5.48xlarge", "processes_per_node=9"],
            OF_RUN,
            "p5.48xlarge runs at most 8 ranks, one per device",
        ),
        (
            ["instance=p5.48xlarge"],
            [*OF_RUN, "backend=xla"],
            "backend=xla does not run on p5.48xlarge; leave it out",
        ),
        (SLURM, [*OF_RUN, 'run_dir="a\\\\b"'], "Slurm drops backslashes from the names of logs"),
        (
            [*SLURM, sbatch("-p trn1")],
            OF_RUN,
            "has '-p trn1': an option is one line, --name=value or --name",
        ),
        (
            [*SLURM, sbatch("--arr=1-2")],
            OF_RUN,
            "--array is set only by launch",
        ),
        # EC2
        (EC2, [*RUN, "run_dir=runs/mine"], "must be in S3"),
        ([*others(EC2), "instance=local"], RUN, "instance=local is not an EC2 instance type"),
        *(
            (EC2, [*RUN, *words], f"{words[-1]}: the machines do not see this computer's folders")
            for words in LOCAL
        ),
        (EC2, [*CSV, "data.path=mine.csv"], "data.path=mine.csv: the machines do not see"),
        (
            EC2,
            [*CSV, "data.path=s3://bucket/mine", f"data.train={__file__}"],
            f"data.train={__file__}: the machines",
        ),
        ([*EC2, "cluster.market=capacity-block"], RUN, "needs the block's id"),
        (
            [*EC2, "cluster.market=spot", "cluster.capacity_reservation=cr-1"],
            RUN,
            "spot cannot use a reservation",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_settings_are_one_line_and_nothing_is_written(
    monkeypatch, tmp_path, capsys, own, of_run, message
):
    (tmp_path / "aws").write_text("[profile mine]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert main([*own, "submit=true", "--", *of_run]) == REJECTED
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert len(said) == 1 and said[0].startswith("error: ") and message in said[0]
    assert not out  # no price
    assert not list((tmp_path / "work").iterdir())


def test_settings_of_a_run_stand_after_two_dashes(capsys):
    assert main(["experiment=demo"]) == REJECTED
    assert (
        "write them after --, as in baretrain launch cluster=local --" in capsys.readouterr().err
    )


# ---- what arrives ----------------------------------------------------------------------------------------------------

EVIL = [
    *(
        "$(touch leaked)",
        "`touch leaked`",
        "; touch leaked #",
        "'\" '\\''",
        'a"b',
        "-rf",
        "--exclude=n1",
    ),
    *(
        "a,b=[1,2],{c: d}",
        "%j%%A%",
        "two  words ",
        "${seed}",
        "$9 ~ * ? !!",
        "ü\u202e",
        "null",
        "x" * 150,
    ),
]
TWO = ["cluster=slurm", "nodes=2", "cluster.gate=false"]


@pytest.fixture(scope="module")
def slurm_job() -> Job:
    return plan(TWO, OF_RUN)[1]


ECHO = b"import json, sys\nprint(json.dumps(sys.argv[1:]))\n"


def test_a_trainer_gets_its_settings_byte_for_byte(slurm_job, monkeypatch, tmp_path):
    """By torchrun's own parser, and by the entry point of the code in a process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    overrides = [
        *EVIL,
        *(f"data.path={each}" for each in EVIL),
        "--help",
        "-m",
        "",
        "a\nb",
        "\u2028ü\x1b[31m\x85",
    ]
    job = dataclasses.replace(slurm_job, run_dir=str(tmp_path / "run"), overrides=overrides)
    job, record = with_module(job, "train", ECHO)
    command = node(monkeypatch, record, "n2").torchrun("train", record.job().overrides)
    assert command[:3] == [job.python, "-m", "torch.distributed.run"]
    read = parse_args(command[3:])
    words = [sys.executable, read.training_script, *read.training_script_args]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(done.stdout) == ["train", *overrides]
    assert not list(tmp_path.rglob("leaked"))


def test_a_real_slurm_leads_a_job_to_its_run(slurm, slurm_job, tmp_path):
    """The job's interpreter prints its arguments here."""
    echo = script(tmp_path / "echo", 'printf "%s\\0" "$@"')
    submitted = []
    for name in (name for name in EVIL if "\\" not in name):
        run_dir = f"{tmp_path}/runs/{name}"
        job = dataclasses.replace(
            slurm_job, run_dir=run_dir, python=echo, folder=str(tmp_path), nodes=1
        )
        record = Record(run_dir, S3Config())
        submitted.append((record, scheduler("slurm").submit(job, record)))
    for record, handle in submitted:
        eventually(
            lambda record=record, handle=handle: (
                not scheduler("slurm").state(record, handle).is_active
            )
        )
        printed = (record.local_folder() / "logs" / "job.txt").read_text().split("\0")
        assert printed == ["-m", "launch.slurm.batch", record.run_dir, ""]
    assert not list(tmp_path.rglob("leaked"))
