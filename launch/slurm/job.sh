#!/bin/bash
# The script of every job: fixed text. What varies is in job.json of the run's record, which launch.slurm.batch reads.
# Arguments: the Python interpreter, the site's prologue (cluster.prologue, may be empty), those of launch.slurm.batch.
set -eo pipefail
python=$1 prologue=$2
shift 2
if [ /dev/stdout -ef /dev/null ]; then # the record is in S3: the output is in a folder that no other user can make first
    folder=/tmp/baretrain-$UID
    mkdir -m 700 "$folder" 2>/dev/null || { [ -d "$folder" ] && [ -O "$folder" ] && [ ! -L "$folder" ]; } || folder=$(mktemp -d)
    chmod 700 "$folder"
    exec >>"$folder/job_$SLURM_JOB_ID.txt" 2>&1
fi
eval "$prologue" # before `set -u`: many a site's `module` reads variables that are not set
set -u
exec "$python" -m launch.slurm.batch "$@" # it takes this shell's place, and so the signals that Slurm sends to it
