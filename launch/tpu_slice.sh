#!/usr/bin/env bash
# A Cloud TPU slice, from queued resource to finished run, with plain gcloud. Prints every gcloud command that it runs.
#
#   launch/tpu_slice.sh run    --name=sdpo --zone=ZONE --type=v5litepod-64 --spot -- COMMAND…   all of it, through preemptions
#   launch/tpu_slice.sh create --name=sdpo --zone=ZONE --type=v5litepod-64 [--spot]             asks for the slice, waits for it
#   launch/tpu_slice.sh install --name=sdpo --zone=ZONE              copies this checkout to all workers, installs requirements
#   launch/tpu_slice.sh start  --name=sdpo --zone=ZONE -- COMMAND…   starts it on all workers; it outlives the connection
#   launch/tpu_slice.sh watch  --name=sdpo --zone=ZONE --type=… -- COMMAND…   waits for its end; starts again after a preemption
#   launch/tpu_slice.sh logs   --name=sdpo --zone=ZONE [--worker=0]  follows the log of one worker
#   launch/tpu_slice.sh status --name=sdpo --zone=ZONE               state of the slice, exit codes of the workers
#   launch/tpu_slice.sh stop   --name=sdpo --zone=ZONE               SIGTERM to all workers: the run saves, then ends
#   launch/tpu_slice.sh delete --name=sdpo --zone=ZONE               gives the slice back
#
# COMMAND is that of one worker, such as: python -m launch.train --config=configs/NAME.py --workdir=gs://BUCKET/runs/NAME
# A run that is to survive a preemption needs a --workdir in a bucket: the disks of the workers go with the slice.
#
# Other flags: --project=… (gcloud's default if unset), --runtime=v2-alpha-tpuv5-lite (the image), --poll_s=60 (between
# looks at the slice), --dry_run (prints the gcloud commands, runs none).
#
# Exit codes: 0 done; 1, 2, 3 those of the command, which starting again would not mend; 2 also for wrong flags; 4 the
# slice could not be had.
set -euo pipefail

readonly TEMPORARY=' 75 143 '  # launch.train: a worker is gone; told to stop. Both resume.

name='' zone='' project='' type='' spot='' runtime='v2-alpha-tpuv5-lite' worker=0 poll=60 dry=''

complain() {
  echo "$1" >&2
  exit 2
}

read_flags() {
  while (($#)); do
    case $1 in
      --name=*) name=${1#*=} ;;
      --zone=*) zone=${1#*=} ;;
      --project=*) project=${1#*=} ;;
      --type=*) type=${1#*=} ;;
      --runtime=*) runtime=${1#*=} ;;
      --worker=*) worker=${1#*=} ;;
      --poll_s=*) poll=${1#*=} ;;
      --spot) spot=1 ;;
      --dry_run) dry=1 ;;
      --) shift && command=("$@") && break ;;
      *) complain "$1 is not a flag; flags are written --name=value, the command comes after -- (see the head of $0)." ;;
    esac
    shift
  done
  [[ -n $name ]] || complain '--name=… is required: what the slice is called.'
  [[ -n $zone ]] || complain '--zone=… is required: where the slice is.'
}

need_command() {
  ((${#command[@]})) || complain "$verb needs the command to start, after --."
}

need_type() {
  [[ -n $type ]] || complain "$verb needs --type=…: v5litepod-8, v5litepod-16, v5litepod-64, v5litepod-256, …"
}

# Prints a gcloud command as it can be typed, then runs it.
run_gcloud() {
  local word
  {
    printf '+ gcloud'
    for word in "$@"; do
      [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
      printf ' %s' "$word"
    done
    printf '\n'
  } >&2
  [[ -n $dry ]] || gcloud "$@"
}

on_slice() {  # what it is about, its verb, other arguments
  run_gcloud compute tpus "$1" "$2" "$name" "--zone=$zone" ${project:+"--project=$project"} "${@:3}"
}

ssh_to() {  # worker (or all), remote command
  on_slice tpu-vm ssh "--worker=$1" "--command=$2"
}

state() {
  if [[ -n $dry ]]; then
    on_slice queued-resources describe '--format=value(state.state)'
    echo ACTIVE
  else
    on_slice queued-resources describe '--format=value(state.state)' || true
  fi
}

create() {
  need_type
  on_slice queued-resources create "--node-id=$name" "--accelerator-type=$type" "--runtime-version=$runtime" \
    ${spot:+--spot}
  local now
  while true; do
    now=$(state)
    case $now in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED)
        echo "The slice $name is $now: look with 'gcloud compute tpus queued-resources describe $name --zone=$zone'," \
          "delete it ($0 delete …), and ask again, elsewhere or for another size." >&2
        exit 4
        ;;
    esac
    echo "Waiting for the slice $name: ${now:-unknown}." >&2
    sleep "$poll"
  done
}

install() {
  local folder
  folder=$(mktemp -d)
  (cd "$(dirname "${BASH_SOURCE[0]}")/.." && git ls-files -z | tar --null --files-from=- -czf "$folder/code.tar.gz")
  run_gcloud compute tpus tpu-vm scp "$folder/code.tar.gz" "$name:sdpo_jax.tar.gz" "--zone=$zone" \
    ${project:+"--project=$project"} --worker=all
  rm -rf "$folder"
  # uv, because the image's own Python may be older than 3.11. Huge pages: without, libtpu starts slowly.
  ssh_to all "set -e; mkdir -p ~/sdpo_jax ~/sdpo_run; tar xzf ~/sdpo_jax.tar.gz -C ~/sdpo_jax; \
python3 -m pip install --user --quiet uv; cd ~/sdpo_jax; \
python3 -m uv venv --quiet --allow-existing --python=3.12 ~/sdpo_venv; \
python3 -m uv pip install --quiet --python ~/sdpo_venv/bin/python -r requirements-tpu.txt; \
sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'"
}

start() {
  need_command
  local line
  line=$(printf '%q ' "${command[@]}")
  # In a session of its own, so that it outlives the connection; one run at a time, since a TPU serves one process.
  ssh_to all "cd ~/sdpo_jax || exit; mkdir -p ~/sdpo_run; \
if [ -s ~/sdpo_run/pid ] && kill -0 \$(cat ~/sdpo_run/pid) 2>/dev/null; then \
timeout 300 tail --pid=\$(cat ~/sdpo_run/pid) -f /dev/null || { echo 'A run is still going on here: stop it first.' >&2; exit 2; }; fi; \
rm -f ~/sdpo_run/exit_code; \
setsid nohup bash -c 'echo \$\$ > ~/sdpo_run/pid; PATH=\$HOME/sdpo_venv/bin:\$PATH; \"\$@\"; echo \$? > ~/sdpo_run/exit_code' \
run $line >> ~/sdpo_run/log 2>&1 < /dev/null &"
}

exit_code() {
  if [[ -n $dry ]]; then
    ssh_to 0 'cat ~/sdpo_run/exit_code 2>/dev/null || echo running'
    echo 0
  else
    ssh_to 0 'cat ~/sdpo_run/exit_code 2>/dev/null || echo running' || true  # Empty: it cannot be reached.
  fi
}

watch() {
  need_command
  need_type
  local now code
  while true; do
    now=$(state)
    if [[ -z $now ]]; then
      echo "The state of the slice $name cannot be seen; trying again." >&2
    elif [[ $now == SUSPENDING || $now == SUSPENDED || $now == FAILED ]]; then
      echo "The slice $name is $now: asking for it again; the run resumes from its last checkpoint." >&2
      on_slice queued-resources delete --force --quiet || true
      create
      install
      start
    elif [[ $now == ACTIVE ]]; then
      code=$(exit_code)
      if [[ $code == 0 ]]; then
        echo 'The run is done.' >&2
        return
      elif [[ $TEMPORARY == *" $code "* ]]; then
        echo "The run ended with exit code $code: starting it again; it resumes from its last checkpoint." >&2
        start
      elif [[ $code =~ ^[0-9]+$ ]]; then
        echo "The run ended with exit code $code; the end of worker 0's log:" >&2
        ssh_to 0 'tail -n 30 ~/sdpo_run/log' >&2
        exit "$((code > 3 ? 1 : code))"
      fi
    fi
    [[ -n $dry ]] || sleep "$poll"
  done
}

verb=${1:-}
command=()
(($# == 0)) || shift
case $verb in
  create | install | start | watch | run | logs | status | stop | delete) read_flags "$@" ;;
  *) complain "Usage: $0 create|install|start|watch|run|logs|status|stop|delete --name=… --zone=… (see its head)." ;;
esac
case $verb in
  create | install | start | watch) "$verb" ;;
  run)
    need_command
    need_type
    create
    install
    start
    watch
    ;;
  logs) ssh_to "$worker" 'tail -n 100 -F ~/sdpo_run/log' ;;
  status)
    state
    ssh_to all 'echo "$(hostname): $(cat ~/sdpo_run/exit_code 2>/dev/null || echo running), $(tail -n 1 ~/sdpo_run/log)"'
    ;;
  stop) ssh_to all 'kill -TERM -- -$(cat ~/sdpo_run/pid)' ;;
  delete) on_slice queued-resources delete --force --quiet ;;
esac
