#!/bin/bash
# The script of every job. All that differs between jobs is in the record's job.json, which launch.slurm.batch reads.
# Arguments: the Python interpreter, cluster.prologue (which may be empty), and the arguments of launch.slurm.batch.
set -eo pipefail
python=$1 prologue=$2
shift 2
if [ /dev/stdout -ef /dev/null ]; then # the record is in S3: write to a private folder of this user
    folder=/tmp/baretrain-$UID
    mkdir -m 700 "$folder" 2>/dev/null || { [ -d "$folder" ] && [ -O "$folder" ] && [ ! -L "$folder" ]; } || folder=$(mktemp -d)
    chmod 700 "$folder"
    exec >>"$folder/job_$SLURM_JOB_ID.txt" 2>&1
fi
eval "$prologue" # before `set -u`: the `module` of many sites reads unset variables
set -u
exec "$python" -m launch.slurm.batch "$@" # replaces this shell, and thereby receives Slurm's signals
