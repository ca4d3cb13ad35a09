"""The Slurm cluster itself: nodes that are machines, two clusters at once, and nothing left of one."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from running import eventually
from services.process import is_alive
from services.slurm_cluster import slurm_cluster
from services.slurm_jobs import field, output, submit, wait_for_state

TESTS = Path(__file__).parent.parent
SLEEP = "trap 'echo TERM; exit 1' TERM; echo started; sleep 600 & wait"


def test_jobs_run_on_nodes_that_are_machines(slurm, tmp_path):
    job_id = submit(slurm, tmp_path, "srun bash -c 'echo $(hostname) $(getent hosts n1) $(</proc/1/comm)'", "-N2")
    wait_for_state(slurm, job_id, "COMPLETED")
    known = f"{slurm.address_of('n1')} n1 sh"
    assert sorted(output(tmp_path, job_id).splitlines()) == [f"n1 {known}", f"n2 {known}"]
    assert slurm.exec("n2", "hostname") == "n2\n"


def test_jobs_reach_a_server_of_the_host(slurm, tmp_path):
    (tmp_path / "file").write_text("from the host")
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)  # it serves the current folder
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    with slurm.reaching(server.server_port) as address:
        said = slurm.exec("n2", "env", "no_proxy=*", sys.executable, "-c", code, f"http://{address}/file")
    server.shutdown()
    assert said == "from the host\n"


def test_an_urgent_job_sends_others_back_into_the_queue(slurm, tmp_path):
    job_id = submit(slurm, tmp_path, SLEEP, "-N2", "--exclusive", "--requeue")
    eventually(lambda: "started" in output(tmp_path, job_id))
    urgent = submit(slurm, tmp_path, "sleep 600", "-N2", "--exclusive", "--partition=urgent")
    wait_for_state(slurm, urgent, "RUNNING")
    assert (field(slurm, job_id, "JobState"), field(slurm, job_id, "Restarts")) == ("PENDING", "1")
    assert "TERM" in output(tmp_path, job_id)


def test_two_clusters_know_nothing_of_each_other(slurm, tmp_path):
    (tmp_path / "other").mkdir()
    job_id = submit(slurm, tmp_path, SLEEP, "-N2")
    with slurm_cluster(tmp_path / "other", num_nodes=3) as other:
        assert other.run("squeue", "--noheader") == ""
        assert sorted(other.run("srun", "-N3", "hostname").split()) == ["n1", "n2", "n3"]
        assert other.network != slurm.network
    wait_for_state(slurm, job_id, "RUNNING")


KILLED = """
import json, os, signal, sys
from pathlib import Path
from services.slurm_cluster import SlurmCluster
cluster = SlurmCluster(Path(sys.argv[1]))
cluster.run("sbatch", "-N2", "--output=/dev/null", "--wrap=exec srun sleep 600")
pids = [process.shell.pid for process in cluster.processes.values()]
print(json.dumps([cluster.network, pids]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_of_a_cluster_outlives_the_tests(slurm, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    network, pids = json.loads(done.stdout)
    assert len(pids) == 5  # switch, munged, slurmctld and two nodes
    card = Path("/sys/class/net", f"slurm{network.rpartition('.')[2]}")
    eventually(lambda: not card.exists() and not (users_of(folder) or [pid for pid in pids if is_alive(pid)]))


def users_of(folder: Path) -> list[str]:
    """Processes whose arguments or environment name the folder: the daemons of a cluster, and its jobs."""
    users = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended by now
            said = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            users += [path.name] if str(folder).encode() in said else []
    return users
