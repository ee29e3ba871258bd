#!/usr/bin/env bash
#SBATCH --job-name=warpool-ranks
#SBATCH --cpus-per-task=1
#SBATCH --mem=2G
#
# The report over many ranks, with the recordings read by a Slurm array: each task takes its share of the files.
#
#   ls snapshots/*.pickle > files.txt
#   job=$(sbatch --parsable --array=0-15 slurm_array.sh files.txt parts)
#   sbatch --dependency=afterany:$job --wrap 'warpool merge parts'
#
# `afterany`: a task with a damaged recording ends with status 2, and its part says which.
set -euo pipefail
list=$1 parts=$2
mkdir -p "$parts"
first=${SLURM_ARRAY_TASK_MIN:-0}
# Every N-th line, from the task's own.
at=$(((SLURM_ARRAY_TASK_ID - first + 1) % SLURM_ARRAY_TASK_COUNT))
mapfile -t files < <(awk -v at=$at -v of="$SLURM_ARRAY_TASK_COUNT" 'NR % of == at' "$list")
[ ${#files[@]} -gt 0 ] || exit 0
exec warpool summarize --jobs "${SLURM_CPUS_PER_TASK:-1}" -o "$parts/$SLURM_ARRAY_TASK_ID.json" "${files[@]}"
