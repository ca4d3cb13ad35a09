"""Facts about a machine from its environment, mounts and packages, by recorded texts."""

import os

import pytest

from train.config import InputError
from train.machine import host, neuron

# A trn1 with its own disk, a cluster's home over NFS, a scratch file system, a disk under a name with a space, and
# /data mounted twice: first from the network, then from a disk of its own over it.
MOUNTS = r"""
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw,discard
26 22 0:23 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw
310 22 0:52 / /home rw,relatime shared:160 - nfs4 10.0.0.7:/home rw,vers=4.2,proto=tcp,addr=10.0.0.7
311 310 259:3 / /home/me/local rw,relatime - xfs /dev/nvme1n1 rw
320 22 0:60 / /fsx rw,relatime shared:9 master:2 - lustre 10.0.1.9@tcp:/abc rw
330 22 259:4 / /my\040disk rw - ext4 /dev/nvme2n1 rw
340 22 0:70 / /data rw - nfs4 10.0.0.7:/data rw
341 340 259:5 / /data rw - ext4 /dev/nvme3n1 rw
350 22 0:80 / /données rw - nfs4 h:/x rw
360 22 0:90 / /s3 rw - fuse mountpoint-s3 rw
""".lstrip()
MOUNTS += "370 22 259:6 / /\udca0usb\u2028\u00a0x rw - vfat /dev/sda1 rw\n"


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    (tmp_path / "mountinfo").write_bytes(os.fsencode(MOUNTS))
    monkeypatch.setattr(host, "MOUNTINFO", tmp_path / "mountinfo")


# ---- compiler flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "--a=1 --b"),
        ("-O1 --c 'x y'", "-O1 --c 'x y' --a=1 --b"),
        ("--a-b=2", "--a-b=2 --a=1 --b"),  # another option, whose name begins alike
        *((given, f"{given} --b") for given in ("--a=2", "--a 2", "--z --a='2'", "'--a=2'")),
        ("--a=1 --b", "--a=1 --b"),
    ],
)
def test_flags_are_appended_to_those_of_the_user_which_stay(given, expected):
    assert neuron.with_flags(given, ["--a=1", "--b"]) == expected


# ---- the compile cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("/home/me/local/cache", None),
        ("s3://bucket/cache", None),
        ("gs://bucket/cache", "folder or s3://bucket/folder"),
        ("/home/me/cache", "is on nfs4"),
        ("/fsx/cache", "is on lustre"),
        ("/s3/cache", f"/var/tmp/baretrain-{os.geteuid()}/neuron"),
        ("", None),  # XDG_CACHE_HOME is on NFS, and the default is not
    ],
)
def test_a_cache_must_be_a_folder_of_this_machine_or_s3(mounts, monkeypatch, location, says):
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/cache")
    fault = neuron.cache_fault({"NEURON_COMPILE_CACHE_URL": location})
    assert (
        fault is None if says is None else says in fault and f"compile cache {location}" in fault
    )


# ---- the runtime's environment -------------------------------------------------------------------------------------


def wanted(environ, *, nodes=1, stochastic_rounding=False):
    return neuron.neuron_environment(environ, nodes=nodes, stochastic_rounding=stochastic_rounding)


def test_several_machines_join_at_the_first_by_another_port_than_torchruns():
    result = wanted({"MASTER_ADDR": "head", "MASTER_PORT": "29500"}, nodes=2)
    several = {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB": "512",
    }
    one = wanted({"MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert result == one | several and not several.keys() & one.keys()
    assert result["NEURON_RT_ROOT_COMM_ID"] == f"head:{neuron.ROOT_COMM_PORT}"
    assert neuron.ROOT_COMM_PORT > 60_999  # Linux takes those up to here for outgoing connections
    assert (
        wanted({"MASTER_ADDR": "fd00::7"})["NEURON_RT_ROOT_COMM_ID"]
        == f"[fd00::7]:{neuron.ROOT_COMM_PORT}"
    )


def test_stochastic_rounding_is_on_only_when_asked_for_and_the_user_may_not_turn_it_off():
    on = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}
    off = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}
    seed = {"NEURON_RT_STOCHASTIC_ROUNDING_SEED": "0"}
    assert (
        wanted({}, stochastic_rounding=True) == wanted({}) | on | seed
        and wanted({}).items() >= off.items()
    )
    with pytest.raises(
        InputError, match="ROUNDING_EN=0 with backend.precision=bf16_stochastic: .* rounded away"
    ):
        wanted(off, stochastic_rounding=True)
    wanted(off)
    wanted(on, stochastic_rounding=True)


# ---- variables, packages, devices ----------------------------------------------------------------------------------


TRN1 = {
    "torch": "2.9.1+cpu",
    "torch-xla": "2.9.0",
    "torch-neuronx": "2.9.0.2.15.32035+abc",
    "neuronx-cc": "2.26.6360.0",
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"torch": "2.15.0"},
            "torch 2.15.0 with torch-xla 2.9.0: both must have the same release",
        ),
        ({"torch": ""}, "torch is missing with torch-xla 2.9.0"),
        (
            {"torch": "2.10.0", "torch-xla": "2.1.0"},
            "pip install 'torch==2.1.*'",
        ),  # 2.1 is no beginning of 2.10
        (
            {"torch-neuronx": "1.0"},
            "torch-neuronx 1.0 is too old, or the public index's empty stub",
        ),
        ({"torch-neuronx": "2.14.3.0.1"}, "torch-neuronx 2.14.3.0.1 has no PyTorch/XLA"),
        ({"torch-neuronx": "2.8.0.2.10.16998"}, "torch-neuronx 2.8.0.2.10.16998 is too old"),
        ({"neuronx-cc": "1.0.0"}, "neuronx-cc 1.0.0 is too old, or the public index's empty stub"),
    ],
)
def test_packages_that_do_not_fit_are_named_with_their_cure(changed, message):
    (fault,) = neuron.package_faults({**TRN1, **changed})
    assert message in fault and "pip install " in fault
