"""What other engines get: cluster=parallelcluster and cluster=skypilot. Their own code reads it, where it is installed
(`make engines`); SkyPilot's task is run by the shell that it would have.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import FLEET, IMAGE, IN_S3, TASK, TRN1, plan, script
from running import ROOT
from services.fake_ec2 import UBUNTU, fake_ec2
from test_launch_golden import check_golden
from torch.distributed.run import parse_args

from launch import code
from launch.__main__ import main
from launch.engines import NAME, ExternalEngine, text_of
from launch.schedulers import engine
from train.cli.command import DONE, REJECTED

INSTALL = ['cluster.setup="python3 -m venv venv && venv/bin/pip install git+https://example.org/baretrain.git"']
INSTALL += ["cluster.python=venv/bin/python"]
BLOCK = ["cluster.market=capacity-block", "cluster.capacity_reservation=cr-0123456789abcdef0", "cluster.key=mine"]
BLOCK += ["cluster.setup_script=s3://bucket/setup.sh", "cluster.buckets=[data]", "nodes=2"]
JOBS = {
    "fleet": TRN1,
    "fleet_block": [*FLEET[:2], "instance=p5.48xlarge", *BLOCK],
    "fleet_alone": [*FLEET, "cluster.market=spot", "cluster.image=ami-01234567", "cluster.head_subnet=subnet-01234567"],
    "task": [*TASK, "nodes=2"],
    "task_alone": [*TASK[:1], "instance=trn1.32xlarge", "cluster.use_spot=true", *INSTALL],
}


def engine_and_job(own: list[str], of_run: list[str] = IN_S3, bundle: bytes = b"") -> tuple[ExternalEngine, Any]:
    cfg, job = plan(own, of_run)
    made = engine(cfg, bundle)
    assert made is not None
    return made, job


def interpreter(name: str) -> str:
    path = ROOT / ".venv/engines" / name / "bin/python"
    if not path.exists():
        pytest.skip(f"no {name} to test with: make engines")
    return str(path)


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_system_of_machines_with_native_pytorch_is_that_of_their_image():
    own = [*FLEET[:2], "instance=trn2.48xlarge", f"cluster.image={IMAGE}", "cluster.os=alinux2023"]
    made, job = engine_and_job(own)
    assert made.content(job)["Image"] == {"Os": "alinux2023", "CustomAmi": IMAGE}


@pytest.mark.parametrize("name", JOBS)
def test_the_file_and_the_commands(monkeypatch, name: str):
    monkeypatch.chdir("/")
    made, job = engine_and_job(JOBS[name])
    commands = "".join(f"# {what}: {' '.join(how)}\n" for what, how in made.steps(job))
    check_golden(f"{name}.yaml", text_of(made.content(job)) + commands)


def test_files_are_written_once_and_nothing_else(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    command = [*TASK, "cluster.folder=out", "--", *IN_S3]
    assert main(command) == DONE and not list(tmp_path.iterdir())
    assert "nothing was written; submit=true does it" in capsys.readouterr().out
    for _ in range(2):  # the same again is no conflict
        assert main(["submit=true", *command]) == DONE
    task = tmp_path / "out/mine.skypilot.yaml"
    assert f"sky launch --cluster=mine --down {task}" in capsys.readouterr().out
    (bundle,) = yaml.safe_load(task.read_text())["file_mounts"].values()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {task, Path(bundle)}
    assert Path(bundle).read_bytes() == code.pack()[0]
    task.write_text("edited: true\n")
    assert main(["submit=true", *command]) == REJECTED
    assert f"{task} is there and differs; remove it" in capsys.readouterr().err
    assert task.read_text() == "edited: true\n"


MADE, OF_TASK = engine_and_job(TASK)


@given(st.text(max_size=60))
def test_a_name_is_valid_for_every_engine(run_dir: str):
    assert re.fullmatch(NAME, MADE.name(dataclasses.replace(OF_TASK, run_dir=run_dir)), re.ASCII)


# ---- what the engines' own code makes of it --------------------------------------------------------------------------

CHECK_TASKS = """
import json, os, sys, sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    (one,) = task.resources
    print(task.name, task.num_nodes, one.instance_type, one.region, one.use_spot, one.network_tier)
"""
# SkyPilot looks for machine types in a catalogue, which it would download.
CATALOGUE = {
    "vms": """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,\
AvailabilityZone
p5.48xlarge,H100,8,192,2048,,55.04,,us-east-1,use1-az1
trn1.32xlarge,Trainium,16,128,512,,21.5,9.5,us-east-1,use1-az1
""",
    "images": "Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId\n",
    "instance_quota_mapping": "InstanceType,OnDemandInstanceCode,SpotInstanceCode,Description\n",
}


@pytest.mark.parametrize("name", [name for name in JOBS if "fleet" in name])
def test_parallelcluster_finds_no_error_in_a_fleet(monkeypatch, tmp_path, name):
    """All that `pcluster create-cluster --dryrun` checks, against moto's EC2, but what moto does not know."""
    python = interpreter("parallelcluster")
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with fake_ec2(monkeypatch) as fake:
        ec2, subnet = fake.client(), fake.private_subnets()[0]
        (described,) = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
        ec2.modify_vpc_attribute(VpcId=described["VpcId"], EnableDnsHostnames={"Value": True})
        for bucket in ("bucket", "data"):
            fake.client("s3").create_bucket(Bucket=bucket)
        fake.client("s3").put_object(Bucket="bucket", Key="setup.sh", Body=b"true")
        block = {"CapacityReservationId": "cr-0123456789abcdef0", "InstanceType": "p5.48xlarge", "State": "active"}
        block |= {"AvailabilityZone": described["AvailabilityZone"], "ReservationType": "capacity-block"}
        block |= {"InstancePlatform": "Linux/UNIX", "TotalInstanceCount": 2, "AvailableInstanceCount": 2}
        fake.reservations = [block]
        own = [*JOBS[name], f"cluster.subnet={subnet}", f"cluster.head_subnet={subnet}", f"cluster.folder={tmp_path}"]
        made, job = engine_and_job([*own, f"cluster.image={UBUNTU}"])
        made.write(job)
        (_, (_, *check)), *_ = made.steps(job)
        launch_templates = ("HeadNodeLaunchTemplate", "ComputeResourceLaunchTemplate")
        unknown = [f"type:{each}Validator" for each in (*launch_templates, "KeyPair")]
        words = [python, "-m", "pcluster.cli.entrypoint", *check, "--suppress-validators", *unknown]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    errors = [each for each in answer.get("configurationValidationErrors", []) if each["level"] == "ERROR"]
    assert not errors and answer["message"].startswith("Request would have succeeded"), done.stdout


def test_skypilot_reads_its_tasks(tmp_path):
    python = interpreter("skypilot")
    paths = []
    for name in ("task", "task_alone"):
        made, job = engine_and_job([*JOBS[name], f"cluster.folder={tmp_path / name}"])
        made.write(job)
        paths.append(made.path(made.file_name(job)))
    catalogue = tmp_path / "home/.sky/catalogs/v8/aws"
    catalogue.mkdir(parents=True)
    for name, text in CATALOGUE.items():
        (catalogue / f"{name}.csv").write_text(text)
    env = {**os.environ, "HOME": str(tmp_path / "home"), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run([python, "-c", CHECK_TASKS, *paths], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-2:] == [
        "mine 2 p5.48xlarge us-east-1 False NetworkTier.BEST",
        "mine 1 trn1.32xlarge us-east-1 True None",
    ], done.stdout + done.stderr


# ---- what a task runs ------------------------------------------------------------------------------------------------


def test_a_machine_unpacks_the_code_and_the_trainer_gets_its_settings_byte_for_byte(tmp_path):
    """By the shell that SkyPilot would use, and torchrun's own parser. tests/test_launch_code.py runs such code."""
    python = script(tmp_path / "python it's", "printf '%s\\0' \"$@\"")
    bundle, packed = code.pack()
    own = [*TASK, "nodes=2", f'cluster.python="{python}"', f"cluster.folder={tmp_path}"]
    made, job = engine_and_job(own, bundle=bundle)
    job = dataclasses.replace(job, code=packed)
    made.write(job)
    ((target, source),) = made.content(job)["file_mounts"].items()
    (tmp_path / target.removeprefix("~/")).parent.mkdir()
    shutil.copy(source, tmp_path / target.removeprefix("~/"))

    def shell(part: str, *overrides: str) -> str:
        task = yaml.safe_load(text_of(made.content(dataclasses.replace(job, overrides=[*overrides]))))
        env = {**os.environ, **task["envs"], "HOME": str(tmp_path)}
        env |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        return subprocess.run(["bash", "-c", task[part]], env=env, capture_output=True, check=True).stdout.decode()

    shell("setup")
    plain = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    texts = st.text(st.one_of(plain, st.sampled_from("\n\x85\u2028\u2029'\"$")), max_size=30)  # line ends of YAML

    @settings(max_examples=60, deadline=None)
    @given(st.lists(texts, max_size=5))
    def check(overrides: list[str]) -> None:
        words = shell("run", *overrides).split("\0")[:-1]
        read = parse_args(words[2:])
        assert words[:2] == ["-m", "torch.distributed.run"] and Path(read.training_script).is_file()
        assert read.training_script_args == ["train", *overrides]
        joined = (read.nnodes, read.nproc_per_node, read.node_rank, read.master_addr, read.master_port)
        assert joined == ("2", "8", 1, "10.0.0.1", 20707) and read.max_restarts == 3

    check()
