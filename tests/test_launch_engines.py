"""What other engines get: cluster=parallelcluster and cluster=skypilot. Their own code reads it, where it is installed
(`make engines`); SkyPilot's task is run by the shell that it would have.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from planning import BUNDLE, plan, script
from running import ROOT, train_overrides
from services.fake_ec2 import UBUNTU
from test_launch_golden import check_golden

from launch import code
from launch.__main__ import main
from launch.code import Bundle
from launch.engines import NAME, Engine, text_of
from launch.schedulers import engine
from train.cli.command import DONE, REFUSED
from train.config import S3Config
from train.storage.folders import open_folder

SUBNET, IMAGE = "subnet-0123456789abcdef0", "ami-0123456789abcdef0"
OF_RUN = ["experiment=albert_pretrain", "data.path=data/albert", "run_dir=s3://bucket/runs/mine"]
FLEET = ["cluster=parallelcluster", f"cluster.subnet={SUBNET}", "instance=trn1.32xlarge"]
TRN1 = [*FLEET, "nodes=16", "spares=1", f"cluster.image={IMAGE}"]
TASK = ["cluster=skypilot", f"cluster.image={IMAGE}", "instance=p5.48xlarge"]
INSTALL = 'cluster.setup="python3 -m venv venv && venv/bin/pip install git+https://example.org/baretrain.git"'
BLOCK = ["cluster.market=capacity-block", "cluster.capacity_reservation=cr-0123456789abcdef0", "cluster.key=mine"]
BLOCK += ["cluster.setup_script=s3://bucket/setup.sh", "cluster.buckets=[data]", "nodes=2"]
JOBS = {
    "fleet": TRN1,
    "fleet_block": [*FLEET[:2], "instance=p5.48xlarge", *BLOCK],
    "fleet_alone": [*FLEET, "cluster.market=spot", "cluster.image=ami-01234567", "cluster.head_subnet=subnet-01234567"],
    "task": [*TASK, "nodes=2"],
    "task_alone": [
        *TASK[:1],
        "instance=trn1.32xlarge",
        "cluster.use_spot=true",
        "cluster.python=venv/bin/python",
        INSTALL,
    ],
}


def engine_and_job(own: list[str], of_run: list[str] = OF_RUN, bundle: Bundle = BUNDLE) -> tuple[Engine, Any]:
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


@pytest.mark.parametrize("name", JOBS)
def test_the_file_and_the_commands(monkeypatch, name: str):
    monkeypatch.chdir("/")
    made, job = engine_and_job(JOBS[name])
    commands = "".join(f"# {what}: {' '.join(how)}\n" for what, how in made.steps(job))
    check_golden(f"{name}.yaml", text_of(made.content(job)) + commands)


def test_files_are_written_once_and_nothing_else(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    command = [*TASK, "cluster.folder=out", "--", *OF_RUN]
    assert main(command) == DONE and not list(tmp_path.iterdir())
    assert "nothing was written; submit=true does it" in capsys.readouterr().out
    for _ in range(2):  # the same again is no conflict
        assert main(["submit=true", *command]) == DONE
    task = tmp_path / "out/mine.skypilot.yaml"
    assert f"sky launch --cluster=mine --down {task}" in capsys.readouterr().out
    (bundle,) = yaml.safe_load(task.read_text())["file_mounts"].values()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {task, Path(bundle)}
    assert Path(bundle).read_bytes() == code.pack().content
    task.write_text("edited: true\n")
    assert main(["submit=true", *command]) == REFUSED
    assert f"{task} is there and differs; remove it" in capsys.readouterr().err
    assert task.read_text() == "edited: true\n"


@given(st.text(max_size=60))
def test_a_name_is_valid_for_every_engine(run_dir: str):
    made, job = ENGINE
    assert re.fullmatch(NAME, made.name(dataclasses.replace(job, run_dir=run_dir)), re.ASCII)


ENGINE = engine_and_job(TASK)


@settings(deadline=None)
@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_every_text_survives_the_file(value: Any):
    assert yaml.safe_load(text_of({"key": value})) == {"key": value}


@pytest.mark.parametrize(
    ("own", "of_run", "message"),
    [
        (["cluster=skypilot"], OF_RUN, "cluster=skypilot needs the type of its machines: instance=trn1.32xlarge, not"),
        ([*TASK, 'instance.name="p5.48xlarge\\"; x"'], OF_RUN, "cluster=skypilot needs the type of its machines"),
        ([*TASK[:1], TASK[2]], OF_RUN, "give cluster.image, or the command that installs it as cluster.setup"),
        ([*TASK, "cluster.gate=true"], OF_RUN, "cluster.gate is for baretrain's own schedulers; leave it out"),
        ([*TASK, "cluster.rendezvous=c10d"], OF_RUN, "cluster.rendezvous is for baretrain's own schedulers"),
        ([*TASK, "cluster.name=a--b"], OF_RUN, "cluster.name='a--b' is not letters, digits and single hyphens"),
        ([*TASK, "cluster.region=here"], OF_RUN, "cluster.region='here' is not a region"),
        ([*TASK, "cluster.region=cn-north-1"], OF_RUN, "is not a region of the partition aws"),
        ([*TASK, "cluster.disk_gib=0"], OF_RUN, "cluster.disk_gib=0 must be above 0"),
        ([*TASK, "cluster.folder=s3://bucket/x"], OF_RUN, "cluster.folder=s3://bucket/x must be a folder of this mach"),
        (TASK, [*OF_RUN, "run_dir=runs/mine"], "is on this machine; SkyPilot's need run_dir=s3://bucket/prefix"),
        ([*TASK, "nodes=2", "instance=trn1.32xlarge"], OF_RUN, "SkyPilot gives trn1.32xlarge no EFA; take nodes=1, or"),
        (
            [*TASK, "prepare=true"],
            ["corpus=text", "corpus.path=x", "output=y", "seq_len=32"],
            "prepare=true is not for",
        ),
        (["cluster=slurm", "cluster.kind=skypilot"], OF_RUN, "cluster.kind=skypilot does not fit the settings chosen"),
        ([FLEET[0], FLEET[2]], OF_RUN, "cluster.subnet is missing: the id of a private subnet"),
        (FLEET, OF_RUN, "ParallelCluster's own image has no Neuron driver: give cluster.image"),
        ([*TRN1, "cluster.os=alinux2023"], OF_RUN, "cluster.os=alinux2023 is too old for torch-neuronx; choose ubuntu"),
        ([*TRN1, "cluster.os=centos7"], OF_RUN, "cluster.os=centos7 is not known; choose one of: ubuntu2204"),
        ([*TRN1, "cluster.market=free"], OF_RUN, "cluster.market=free is not known; choose one of: on-demand, spot"),
        ([*TRN1, "cluster.market=capacity-block"], OF_RUN, "cluster.market=capacity-block needs the block's id"),
        (
            [*TRN1, "cluster.market=spot", "cluster.capacity_reservation=cr-01234567"],
            OF_RUN,
            "cluster.market=spot has no reservation",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings_are_one_line_and_nothing_is_written(monkeypatch, tmp_path, capsys, own, of_run, message):
    monkeypatch.chdir(tmp_path)
    assert main([*own, "submit=true", "--", *of_run]) == REFUSED
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(said) == 1 and said[0].startswith("error: ") and message in said[0]
    assert not list(tmp_path.iterdir())


# ---- what the engines' own code makes of it --------------------------------------------------------------------------

CHECK_FLEETS = """
import json, sys, yaml
from pcluster.schemas.cluster_schema import ClusterSchema
for text in json.load(sys.stdin):
    (queue,) = ClusterSchema(cluster_name="mine").load(yaml.safe_load(text)).scheduling.queues
    (machines,) = queue.compute_resources
    print(queue.capacity_type, machines.instance_type, machines.min_count, machines.max_count, machines.efa.enabled)
"""
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


@pytest.fixture
def aws(monkeypatch, tmp_path) -> Iterator[None]:
    """moto's AWS, which child processes talk to as well."""
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    # Servers of one process share their resources: those of other tests go.
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield
    server.stop()


def test_parallelcluster_reads_its_files():
    texts = [
        text_of(made.content(job))
        for name, own in JOBS.items()
        if "fleet" in name
        for made, job in [engine_and_job(own)]
    ]
    words = [interpreter("parallelcluster"), "-c", CHECK_FLEETS]
    nobody = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    env = {**os.environ, **nobody}  # whom it asks for the reservation; it goes on without an answer
    done = subprocess.run(words, input=json.dumps(texts), env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "CapacityType.ONDEMAND trn1.32xlarge 0 17 True",
        "CapacityType.CAPACITY_BLOCK p5.48xlarge 2 2 True",
        "CapacityType.SPOT trn1.32xlarge 0 1 False",
    ], done.stderr


def test_parallelcluster_finds_no_error_in_a_fleet(aws, tmp_path):
    """All that `pcluster create-cluster --dryrun` checks, against moto's EC2, but what moto cannot run dry."""
    python = interpreter("parallelcluster")
    ec2 = boto3.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]
    boto3.client("s3").create_bucket(Bucket="bucket")
    own = [*TRN1, f"cluster.subnet={subnet}", f"cluster.image={UBUNTU}", f"cluster.folder={tmp_path}"]
    made, job = engine_and_job(own)
    made.write(job)
    (_, (_, *check)), *_ = made.steps(job)
    no_dry_run = [f"type:{part}LaunchTemplateValidator" for part in ("HeadNode", "ComputeResource")]
    words = [python, "-m", "pcluster.cli.entrypoint", *check, "--suppress-validators", *no_dry_run]
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


def shell(task: dict[str, Any], part: str, home: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, **task["envs"], "HOME": str(home), **variables}
    return subprocess.run(["bash", "-c", task[part]], env=env, capture_output=True, check=False)


def test_the_trainer_gets_its_settings_byte_for_byte(tmp_path):
    python = script(tmp_path / "python it's", "printf '%s\\0' \"$@\"")
    made, job = engine_and_job([*TASK, "nodes=2", f'cluster.python="{python}"'])
    texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(texts, max_size=5))
    def check(overrides: list[str]) -> None:
        task = yaml.safe_load(text_of(made.content(dataclasses.replace(job, overrides=overrides))))
        done = shell(task, "run", tmp_path, SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2")
        words = done.stdout.decode().split("\0")[:-1]
        assert words[:10] == [
            *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=8", "--node-rank=1"),
            *("--master-addr=10.0.0.1", "--master-port=20707", "--max-restarts=3"),
            *(f"{tmp_path}/baretrain/code-{'0' * 16}/start.py", "train"),
        ]
        assert words[10:] == overrides

    check()


def test_a_task_trains(bucket, prepared, tmp_path):
    """Setup and run of a task on two machines, both this one: a run of six steps in a real S3."""
    location = bucket.location("runs/mine")
    of_run = [*train_overrides(tmp_path, prepared), f"run_dir={location}", f"s3.endpoint={bucket.service.endpoint}"]
    own = ["cluster=skypilot", f"cluster.image={IMAGE}", "instance=g5.12xlarge", "nodes=2", "processes_per_node=1"]
    own += ["instance.efa_interfaces=0", f"cluster.python={sys.executable}", f"cluster.folder={tmp_path}"]
    made, job = engine_and_job(
        own, [*of_run, "instance=local", "s3.region=us-east-1", "s3.path_style=true"], code.pack()
    )
    made.write(job)
    task = yaml.safe_load((tmp_path / "mine.skypilot.yaml").read_text())
    homes = [tmp_path / "node_0", tmp_path / "node_1"]
    for home in homes:
        for target, source in task["file_mounts"].items():
            (home / target.removeprefix("~/")).parent.mkdir(parents=True)
            (home / target.removeprefix("~/")).write_bytes(Path(source).read_bytes())
        assert shell(task, "setup", home).returncode == 0
    with ThreadPoolExecutor() as threads:
        ran = [
            threads.submit(
                shell, task, "run", home, SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.1"
            )
            for rank, home in enumerate(homes)
        ]
    assert [each.result().returncode for each in ran] == [0, 0], [each.result().stderr[:2000] for each in ran]
    outcome = json.loads(open_folder(location, S3Config(**job.s3)).read("outcome.json"))
    assert (outcome["outcome"], job.overrides[-1]) == ("done", f'run_dir="{location}"')
