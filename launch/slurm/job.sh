#!/bin/bash
# The script of every job: fixed text. What varies is in job.json of the run's record, which launch.slurm.batch reads.
# Arguments: the Python interpreter, the site's prologue (cluster.prologue, may be empty), those of launch.slurm.batch.
set -eo pipefail
python=$1 prologue=$2
shift 2
eval "$prologue" # before `set -u`: many a site's `module` reads variables that are not set
set -u
exec "$python" -m launch.slurm.batch "$@" # it takes this shell's place, and so the signals that Slurm sends to it
