#!/bin/bash
# What a machine of EC2 runs first, as its user data: fixed text, to which launch/ec2/request.py adds one line that calls
# main with base64 of JSON. No other text of the user comes into a shell.
#
# However this ends, the machine ends, and EC2 terminates it (InstanceInitiatedShutdownBehavior): when the node program
# has ended or cannot be started, when it has been silent for dead_s, at end_s, and when it was rebooted.
set -euo pipefail

state=/run/baretrain # of this boot
log=$state/machine.txt
step_s=5 # between two looks at the node program
given="" instance="" python="" # empty until they are known

main() {
    local values end_s dead_s run request max_run_s code
    given=$1
    if ! instance=$(</var/lib/cloud/data/instance-id); then shutdown -P now; fi
    mkdir -p "$state"
    exec 3>&1 >>"$log" 2>&1
    trap 'finish $?' EXIT

    mapfile -t values < <(read_given "$given")
    if ((${#values[@]} < 6)); then
        echo "the user data cannot be read"
        return 1
    fi
    python=${values[0]} end_s=${values[1]} dead_s=${values[2]} request=${values[3]} max_run_s=${values[4]} run=${values[5]}
    shutdown -P "+$((end_s / 60))"
    touch "$state/alive"
    end_when_silent "$dead_s" &
    end_after_reboot

    export HOME=${HOME:-/root} LC_ALL=C.UTF-8
    export PATH=$PATH:${python%/*}:/opt/aws/neuron/bin:/opt/amazon/efa/bin # of compilers and tools that are called by name
    # Its own NVMe disks, which the image's service has mounted.
    if mountpoint -q /mnt/local; then export XDG_CACHE_HOME=/mnt/local/cache; fi
    code=$(mktemp --directory "$state/code.XXXXXX")
    "$python" -c "$PROGRAM" fetch "$given" >"$code/bundle"
    tar --extract --gzip --no-same-owner --file="$code/bundle" --directory="$code"
    cd /
    "$python" "$code/start.py" launch.ec2.machine "$run" "--request=$request" "--max-run-s=$max_run_s" "--state=$state" \
        "${values[@]:6}"
}

# Print what the JSON holds, a line each. The system's own Python is there: cloud-init is written in it.
read_given() {
    python3 -c '
import base64, json, sys
given = json.loads(base64.b64decode(sys.argv[1]))
counts = [int(given[name]) for name in ("end_s", "dead_s", "request", "max_run_s")]
print(given["python"], *counts, given["run"], *given["s3"], sep="\n")' "$1"
}

# End the machine when the node program has been silent for some time. It makes the file whenever it has reached S3.
end_when_silent() {
    local silent_s=0
    while ((silent_s < $1)); do
        sleep "$step_s"
        silent_s=$((silent_s + step_s)) # counted, since the clock may be set meanwhile
        if rm "$state/alive" 2>/dev/null; then silent_s=0; fi
    done
    echo "the node program has been silent for $1 s" >&3
    shutdown -P now
}

# End the machine when it boots again: its timers are gone, and its part in the run is lost. A machine whose disk was
# made of an image of this one has another id.
end_after_reboot() {
    local script=/var/lib/cloud/scripts/per-boot/baretrain.sh
    mkdir -p "${script%/*}"
    cat >"$script" <<END
#!/bin/bash
if [[ \$(</var/lib/cloud/data/instance-id) == "$instance" ]]; then shutdown -P now; fi
END
    chmod 700 "$script"
}

# Say why the machine ends, on the console and in the record, and end it.
finish() {
    local code=$1
    if ((code == 143)); then return; fi # SIGTERM to the node program: the system goes down already
    if ((code != 0)); then
        tail -n 20 "$log" >&3 || true
        if [[ -n $python ]]; then tail -n 1 "$log" | "$python" -c "$PROGRAM" report "$given" "$instance" || true; fi
    fi
    shutdown -P now
}

# fetch: write the bundle to standard output, checked. report: put standard input into the record, as the reason.
read -r -d '' PROGRAM <<'PYTHON' || true
import base64, hashlib, json, sys, time
import boto3
from botocore.config import Config

command, given = sys.argv[1], json.loads(base64.b64decode(sys.argv[2]))
flags = dict(flag.partition("=")[::2] for flag in given["s3"])
endpoint, region = flags.get("--endpoint"), flags.get("--region")
style = {"addressing_style": "path" if "--path-style" in flags else "auto"}
config = Config(s3=style, retries={"mode": "standard", "total_max_attempts": 8}, connect_timeout=10, read_timeout=60)
client = boto3.client("s3", endpoint_url=endpoint, region_name=region, config=config)
bucket, _, prefix = given["run"].removeprefix("s3://").partition("/")
if command == "fetch":
    name = f"{prefix}.launch/{given['bundle']}"
    content = client.get_object(Bucket=bucket, Key=name)["Body"].read()
    if hashlib.sha256(content).hexdigest() != given["bundle_sha256"]:
        sys.exit(f"error: s3://{bucket}/{name} does not match its checksum; launch the run again")
    sys.stdout.buffer.write(content)
else:
    reason = {"reason": sys.stdin.read().strip()[:1000], "time_unix_s": time.time()}
    body = json.dumps(reason).encode()
    client.put_object(Bucket=bucket, Key=f"{prefix}.launch/ec2/failed/{sys.argv[3]}.json", Body=body)
PYTHON

