"""The scripts of ami/provision, really run as root in a fresh system that debootstrap makes from apt's own mirror.

It is Debian, not Ubuntu, and has no kernel. Not run: drivers, devices, systemd, the installation of torch.
/opt/baretrain/venv gets our wheel through pip, without what it depends on: those packages are the ones of this test's
environment, mounted read-only.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig

import pytest
from package_indexes import CUDA, NEURON, write_indexes
from planning import script
from running import ROOT
from services.machines import NOT_PERMITTED

from ami.files import image_values, shell_values, write_files
from train.machine.versions import read_versions

PROVISION = ROOT / "ami/provision"
PACKAGES = sysconfig.get_paths()["purelib"]
INSIDE = """set -e
root=$1; shift
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir -p "$root/mnt/packages"
mount --bind "$PACKAGES" "$root/mnt/packages"
mount -o remount,ro,bind "$root/mnt/packages"
exec chroot "$root" "$@"
"""


# folders whose content may change
# threads that share a busy processor wait for one another
SMOKE = {
    "DEVICES": "absent",
    "OMP_NUM_THREADS": "1",
}
BASE = "ami-0123456789abcdef0"


def mirror():
    """URI and release of the first repository with this system's own packages that apt is configured with."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    shown = ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)"]
    done = subprocess.run(shown, capture_output=True, text=True, check=True)
    rows = [row.split() for row in done.stdout.splitlines()]
    return next(((row[2], release) for row in rows if row[:2] == [release, "main"]), None)


def inside(root, *command, check=True, **environment):
    words = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--uts",
        "sh",
        "-c",
        INSIDE,
        "sh",
        str(root),
        "env",
        "-i",
    ]
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    words += [
        path,
        "HOME=/root",
        "LC_ALL=C.UTF-8",
        *(f"{name}={value}" for name, value in environment.items()),
    ]
    done = subprocess.run(
        [*words, *command],
        env={**os.environ, "PACKAGES": PACKAGES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, (
        f"{command}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done


def provision(root, name, **options):
    shutil.copy(PROVISION / f"{name}.sh", root / "tmp/script.sh")
    return inside(root, "bash", "/tmp/script.sh", **options)


def fails(root, name, words, **environment):
    done = provision(root, name, check=False, **environment)
    assert done.returncode == 1 and words in done.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    missing = [name for name in ("debootstrap", "unshare", "gpg") if shutil.which(name) is None]
    if missing or os.getuid() != 0 or (where := mirror()) is None:
        pytest.skip(
            f"no fresh system to test with: {missing} missing, not root, or apt has no repository"
        )
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"{NOT_PERMITTED}: no mount namespaces either")
    folder = tmp_path_factory.mktemp("system") / "root"
    # nobody reads its manuals, and it need not outlive a power cut
    settings = folder / "etc/dpkg/dpkg.cfg.d/quick"
    settings.parent.mkdir(parents=True)
    settings.write_text(
        "force-unsafe-io\npath-exclude=/usr/share/doc/*\npath-exclude=/usr/share/man/*\n"
    )
    words = ["debootstrap", "--variant=minbase", "--include=systemd,ca-certificates,python3"]
    done = subprocess.run(
        [*words, where[1], folder, where[0]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    # no service starts in here
    (folder / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
    (folder / "usr/sbin/policy-rc.d").chmod(0o755)
    shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")
    yield folder
    shutil.rmtree(folder)


def use_packages_of_this_environment(root):
    (site,) = (root / "opt/baretrain/venv/lib").glob("python3.*/site-packages")
    ours = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if site.parent.name != ours:
        pytest.skip(f"this system's {site.parent.name} cannot load the packages of {ours}")
    (site / "packages.pth").write_text("/mnt/packages\n")


def test_an_image_is_made_and_tested(root, tmp_path, monkeypatch):
    public, _ = write_indexes(monkeypatch, tmp_path)
    uploaded = write_files(tmp_path, CUDA, BASE, read_versions(), "none")
    lines = (uploaded / "requirements.txt").read_text().splitlines(keepends=True)
    kept = [each for each in lines if each[0] == "." or "setuptools" in each]
    (uploaded / "requirements.txt").write_text("".join(kept))
    shutil.copytree(public / "setuptools", root / "srv/wheels", dirs_exist_ok=True)
    make(root, uploaded)
    text = root / "usr/share/common-licenses/GPL-3"
    content = text.read_bytes()
    text.write_text("")  # nothing to learn from
    fails(root, "smoke", "error: baretrain prepare failed: ", **SMOKE)
    text.write_bytes(content)
    assert provision(root, "smoke", **SMOKE).stdout.endswith("smoke test passed\n")

    made = json.loads((root / "etc/baretrain/manifest.json").read_text())
    assert (made["image"], made["base_image"]) == ("cuda", BASE)
    assert made["baretrain"] == read_versions()["baretrain"]
    assert made["packages"]["torch"].startswith(read_versions()["torch"])
    assert "mdadm" in made["system_packages"]
    limits = (root / "etc/security/limits.d/90-baretrain.conf").read_text()
    assert "* - memlock unlimited\n" in limits
    enabled = root / "etc/systemd/system/multi-user.target.wants"
    services = {path.name for path in enabled.iterdir()}
    assert {"baretrain-nvme.service", "chrony.service"} <= services
    assert (root / "etc/machine-id").read_text() == "" and not (root / "tmp/baretrain").exists()
    assert "baretrain:!:" in (root / "etc/shadow").read_text()


def make(root, uploaded):
    """All of an image but its smoke test."""
    shutil.copytree(uploaded, root / "tmp/baretrain")
    provision(root, "files")
    provision(root, "common")
    provision(root, "baretrain", PIP_ARGS="--no-index --find-links=/srv/wheels")
    use_packages_of_this_environment(root)
    provision(root, "harden")


# ---- with repositories and installers of our own: the real ones need AWS, and hardware -------------------------------


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    """Signs files with a key of its own; `fingerprint` and `public` are the key's."""
    home = tmp_path_factory.mktemp("gnupg", numbered=True)
    home.chmod(0o700)

    def gpg(*words):
        command = [
            "gpg",
            "--homedir",
            str(home),
            "--batch",
            "--yes",
            "--passphrase",
            "",
            *map(str, words),
        ]
        return subprocess.run(command, capture_output=True, check=True).stdout

    gpg("--quick-generate-key", "tests@example.org", "ed25519", "sign")
    gpg.fingerprint = (
        gpg("--with-colons", "--list-keys")
        .decode()
        .partition("\nfpr:::::::::")[2]
        .partition(":")[0]
    )
    gpg.public = gpg("--armor", "--export")
    yield gpg
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "gpg-agent"], check=False)


def environment_file(root, image="neuron", **changes):
    values = {
        **image_values({"cuda": CUDA, "neuron": NEURON}[image], BASE, read_versions(), "none"),
        **changes,
    }
    (root / "etc/baretrain").mkdir(exist_ok=True)
    shutil.copy(PROVISION / "functions.sh", root / "etc/baretrain")
    (root / "etc/baretrain/image.env").write_text(shell_values(values))


@pytest.fixture
def tooled(root):
    """The root with what common.sh installs, without which the other scripts are not run."""
    if not (root / "usr/bin/curl").exists():
        environment_file(root)
        provision(root, "common")
    return root


INSTALLER = """
mkdir -p /opt/amazon
echo "# EFA installer version: {version}" > /opt/amazon/efa_installed_packages
echo run >> /opt/amazon/runs
"""


def test_an_efa_installer_is_run_once_and_only_if_it_is_signed(tooled, signer, tmp_path):
    root = tooled
    version = read_versions()["efa-installer"]
    offered = root / "srv/efa"
    runs = root / "opt/amazon/runs"
    offered.mkdir()
    (tmp_path / "aws-efa-installer").mkdir()
    script(tmp_path / "aws-efa-installer/efa_installer.sh", INSTALLER.format(version=version))
    archive = offered / f"aws-efa-installer-{version}.tar.gz"
    subprocess.run(["tar", "-C", tmp_path, "-czf", archive, "aws-efa-installer"], check=True)
    signer("--detach-sign", "-o", f"{archive}.sig", archive)
    (offered / "aws-efa-installer.key").write_bytes(signer.public)
    own = {"EFA_URL": "file:///srv/efa"}

    environment_file(root)
    fails(root, "efa", f"installer is {signer.fingerprint} and not 4E9091BC", **own)
    environment_file(root, EFA_KEY=signer.fingerprint)
    whole = archive.read_bytes()
    archive.write_bytes(whole + b"\0")
    fails(root, "efa", f"is not signed by {signer.fingerprint}: nothing was run", **own)
    assert not runs.exists()

    archive.write_bytes(whole)
    for _ in range(2):
        provision(root, "efa", **own)
    assert runs.read_text() == "run\n"
