#!/bin/bash
# The user data of a machine on EC2: the script that it runs at its first boot. launch/ec2/request.py appends one line,
# which calls main with numbers, a path of plain characters, and JSON in base64. No other user input reaches a shell.
#
# The machine always shuts down in the end, and EC2 then terminates it (InstanceInitiatedShutdownBehavior): when the
# node program has ended or cannot start, when it has been silent for dead_s, after end_s, or after a reboot.
set -euo pipefail

state=/run/baretrain # emptied by every boot
log=$state/machine.txt
step_s=5 # between two checks for the file `alive`

main() {
    local end_s=$1 dead_s=$2
    python=$3 given=$4
    if ! instance=$(</var/lib/cloud/data/instance-id); then shutdown -P now; fi
    mkdir -p "$state"
    exec 3>&1 >>"$log" 2>&1
    trap 'finish $?' EXIT
    shutdown -P "+$((end_s / 60))"
    touch "$state/alive"
    end_when_silent "$dead_s" &
    end_after_reboot

    export HOME=${HOME:-/root} LC_ALL=C.UTF-8
    export PATH=$PATH:${python%/*}:/opt/aws/neuron/bin:/opt/amazon/efa/bin # tools are called by name
    # The image's service mounts the machine's NVMe disks at /mnt/local.
    if mountpoint -q /mnt/local; then export XDG_CACHE_HOME=/mnt/local/cache; fi
    cd /
    "$python" -c "$PROGRAM" start "$given" "$state"
}

# Shut down if the node program has not reached S3 for $1 seconds. Whenever it does, it makes the file `alive`.
end_when_silent() {
    local silent_s=0
    while ((silent_s < $1)); do
        sleep "$step_s"
        silent_s=$((silent_s + step_s)) # not from the clock, which may be adjusted meanwhile
        if rm "$state/alive" 2>/dev/null; then silent_s=0; fi
    done
    echo "the node program has been silent for $1 s" >&3
    shutdown -P now
}

# Shut down if this machine boots again: its timers are gone, and it can no longer take part in the run. A machine that
# starts from an image of this disk has another id, and does not shut down.
end_after_reboot() {
    local script=/var/lib/cloud/scripts/per-boot/baretrain.sh
    mkdir -p "${script%/*}"
    cat >"$script" <<END
#!/bin/bash
if [[ \$(</var/lib/cloud/data/instance-id) == "$instance" ]]; then shutdown -P now; fi
END
    chmod 700 "$script"
}

# Write the reason to the console and into the record, and shut down.
finish() {
    local code=$1
    if ((code == 143)); then return; fi # SIGTERM to launch.ec2.machine: the system is already shutting down
    if ((code != 0)); then
        tail -n 20 "$log" >&3 || true
        tail -n 1 "$log" | "$python" -c "$PROGRAM" report "$given" "$instance" || true
    fi
    shutdown -P now
}

# start: fetch the code, check it, and become launch.ec2.machine. report: record standard input as the reason.
read -r -d '' PROGRAM <<'PYTHON' || true
import base64, hashlib, io, json, os, sys, tarfile, tempfile, time
import boto3
from botocore.config import Config

command, given, argument = sys.argv[1], json.loads(base64.b64decode(sys.argv[2])), sys.argv[3]
flags = dict(flag.partition("=")[::2] for flag in given["s3"])
endpoint, region = flags.get("--endpoint"), flags.get("--region")
style = {"addressing_style": "path" if endpoint and ".amazonaws.com" not in endpoint else "virtual"}
config = Config(s3=style, retries={"mode": "standard", "total_max_attempts": 8}, connect_timeout=10, read_timeout=60)
client = boto3.client("s3", endpoint_url=endpoint, region_name=region, config=config)
bucket, _, prefix = given["run"].removeprefix("s3://").partition("/")
if command == "start":
    name = f"{prefix}.launch/{given['bundle']}"
    content = client.get_object(Bucket=bucket, Key=name)["Body"].read()
    if hashlib.sha256(content).hexdigest() != given["sha256"]:
        sys.exit(f"error: s3://{bucket}/{name} does not match its checksum; launch the run again")
    folder = tempfile.mkdtemp(dir=argument)
    tarfile.open(fileobj=io.BytesIO(content)).extractall(folder, filter="data")
    os.execv(sys.executable, [sys.executable, f"{folder}/start.py", *given["arguments"], f"--state={argument}"])
reason = {"reason": sys.stdin.read().strip()[:1000], "time_unix_s": time.time()}
name = f"{prefix}.launch/ec2/failed/{argument}.json"
client.put_object(Bucket=bucket, Key=name, Body=json.dumps(reason).encode())
PYTHON

