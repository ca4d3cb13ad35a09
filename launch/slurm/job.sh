#!/bin/bash
# The script of every job. All that differs between jobs is in the record's job.json, which launch.slurm.batch reads.
# Arguments: the Python interpreter and the arguments of launch.slurm.batch.
set -euo pipefail
python=$1
shift
if [ /dev/stdout -ef /dev/null ]; then # the record is in S3: write to a private folder of this user
    folder=/tmp/baretrain-$UID
    mkdir -m 700 "$folder" 2>/dev/null || { [ -d "$folder" ] && [ -O "$folder" ] && [ ! -L "$folder" ]; } || folder=$(mktemp -d)
    chmod 700 "$folder"
    exec >>"$folder/job_$SLURM_JOB_ID.txt" 2>&1
fi
exec "$python" -m launch.slurm.batch "$@" # replaces this shell, and thereby receives Slurm's signals
