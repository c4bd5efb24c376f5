#!/usr/bin/env bash
# Runs a command on a Cloud TPU slice, from queued resource to finished run. Prints every gcloud command that it runs.
#
#   launch/tpu_slice.sh VERB --name=sdpo --zone=ZONE [flags] [-- COMMAND…]
#
#   run      create, install, start and watch; needs --type and COMMAND
#   create   requests the slice and waits for it; needs --type
#   install  copies this checkout to all workers, and installs the requirements
#   start    starts COMMAND on all workers; it outlives the connection
#   watch    waits for its end, and starts it again after preemptions; needs --type and COMMAND
#   logs     follows the log of one worker
#   status   state of the slice; for each worker whether COMMAND runs or its exit code, and the last line of the log
#   stop     sends SIGTERM to all workers: the run saves, then ends
#   delete   releases the slice
#
# COMMAND runs on every worker: python -m launch.train --config=configs/NAME.py --workdir=gs://BUCKET/runs/NAME
# To survive preemptions, a run needs a --workdir in a bucket: the disks of the workers are lost with the slice.
#
#   --name=…      name of the slice
#   --zone=…      its zone
#   --project=…   its project; gcloud's default if unset
#   --type=…      v5litepod-8, v5litepod-16, v5litepod-64, v5litepod-256, …
#   --spot        requests spot capacity, which can be preempted
#   --runtime=…   image of the workers; v2-alpha-tpuv5-lite if unset
#   --worker=0    worker whose log is shown
#   --poll_s=60   seconds between checks of the slice
#   --wait_s=300  seconds that install and start wait for the previous run to end, for example while it saves
#   --dry_run     prints the gcloud commands without running them
#
# Exit codes: 0 done; 1, 2, 3 those of the command, if starting it again would not help; 2 also for wrong flags; 4 the
# slice could not be created; 5 worker 0 could not be reached, or the run not started again, ten times in a row.
set -euo pipefail

readonly MISSES=10  # Checks of an ACTIVE slice that may fail in a row; at 60 s each, longer than a worker boots.

# Puts a script for the workers on one line, since the command is printed.
one_line() {
  tr -s '\n ' ' ' | sed 's/ $//'
}

# Whether a process of the run's group is alive: the wrapper, the command, or their children. Zombies are not, nor is a
# process that has the number after a reboot of the worker.
ALIVE=$(one_line <<'END'
alive() {
  read -r group boot < ~/sdpo_run/group && [ "$boot" = "$(cat /proc/sys/kernel/random/boot_id)" ] &&
    ps -eo pgid=,stat= | grep -q "^ *$group [^Z]";
} 2> /dev/null;
END
)

# Waits for the previous run to end, and admits one caller at a time: a TPU serves one process, a workdir one run.
ALONE=$(one_line <<'END'
mkdir -p ~/sdpo_run; exec 9> ~/sdpo_run/lock; flock 9 || exit; end=$(($(date +%s) + patience));
while alive; do
  [ $(date +%s) -lt $end ] || { echo 'A run is still going on here: stop it first.' >&2; exit 2; };
  sleep 0.5;
done;
END
)

# Runs the command in a group. SIGTERM goes to the whole group; the wrapper survives it to record the exit code.
WRAPPER=$(one_line <<'END'
trap : TERM; echo "$$ $(cat /proc/sys/kernel/random/boot_id)" > ~/sdpo_run/group; PATH=$HOME/sdpo_venv/bin:$PATH; "$@";
echo $? > ~/sdpo_run/exit_code.new && mv ~/sdpo_run/exit_code.new ~/sdpo_run/exit_code
END
)

# Waits until the group is recorded, so that later calls find it.
STARTED=$(one_line <<'END'
end=$(($(date +%s) + 30));
until [ -s ~/sdpo_run/group ]; do
  [ $(date +%s) -lt $end ] || { echo 'The run could not be started here: see ~/sdpo_run/log.' >&2; exit 1; };
  sleep 0.1;
done
END
)

# Reads the exit code again after checking the group, since it may have been written in between.
OUTCOME=$(one_line <<'END'
outcome() {
  cat ~/sdpo_run/exit_code 2> /dev/null || { alive && echo running; } || cat ~/sdpo_run/exit_code 2> /dev/null ||
    { [ -e ~/sdpo_run/group ] && echo lost; } || echo 'not started';
};
END
)

STATUS=$(one_line <<'END'
echo "$(hostname): $(outcome)$([ ! -e ~/sdpo_run/exit_code ] || ! alive || echo ', but some of its processes live on'),
$(tail -n 1 ~/sdpo_run/log 2> /dev/null)"
END
)

STOP=$(one_line <<'END'
if alive; then kill -s TERM -- -$group; else echo 'No run is going on here.' >&2; fi
END
)
readonly ALIVE ALONE WRAPPER STARTED OUTCOME STATUS STOP

name='' zone='' project='' type='' spot='' runtime='v2-alpha-tpuv5-lite' worker=0 poll=60 patience=300 dry='' misses=0

usage() {
  sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

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
      --wait_s=*) patience=${1#*=} ;;
      --spot) spot=1 ;;
      --dry_run) dry=1 ;;
      --) shift && command=("$@") && break ;;
      --help | -h) usage && exit ;;
      *) complain "$1 is not a flag; flags are written --name=value, the command comes after -- (--help lists them)." ;;
    esac
    shift
  done
  [[ -n $name ]] || complain '--name=… is required: the name of the slice.'
  [[ -n $zone ]] || complain '--zone=… is required: the zone of the slice.'
  [[ $poll =~ ^[0-9]+(\.[0-9]+)?$ ]] || complain "--poll_s=$poll must be a number of seconds."
  [[ $patience =~ ^[0-9]+$ ]] || complain "--wait_s=$patience must be a whole number of seconds."
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

on_slice() {  # kind of resource, verb, further arguments
  run_gcloud compute tpus "$1" "$2" "$name" "--zone=$zone" ${project:+"--project=$project"} "${@:3}"
}

ssh_to() {  # worker (or all), remote command
  on_slice tpu-vm ssh "--worker=$1" "--command=$2"
}

describe() {
  on_slice queued-resources describe '--format=value(state.state)' || true  # Empty: unknown.
}

state() {
  describe
  [[ -z $dry ]] || echo ACTIVE
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
  (cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && git ls-files -z | tar --null --files-from=- -czf "$folder/code.tar.gz")
  run_gcloud compute tpus tpu-vm scp "$folder/code.tar.gz" "$name:sdpo_jax.tar.gz" "--zone=$zone" \
    ${project:+"--project=$project"} --worker=all
  rm -rf "$folder"
  # uv, because the Python of the image may be older than 3.11. Huge pages, because libtpu starts slowly without them.
  ssh_to all "set -e; patience=$patience; $ALIVE $ALONE mkdir -p ~/sdpo_jax; tar xzf ~/sdpo_jax.tar.gz -C ~/sdpo_jax; \
python3 -m pip install --user --quiet uv; cd ~/sdpo_jax; \
python3 -m uv venv --quiet --allow-existing --python=3.12 ~/sdpo_venv; \
python3 -m uv pip install --quiet --python ~/sdpo_venv/bin/python -r requirements-tpu.txt; \
sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'"
}

start() {
  need_command
  local line
  line=$(printf '%q ' "${command[@]}")
  # In its own session, so that it outlives the connection.
  ssh_to all "cd ~/sdpo_jax || exit; patience=$patience; $ALIVE $ALONE rm -f ~/sdpo_run/exit_code ~/sdpo_run/group; \
setsid nohup bash -c '$WRAPPER' run $line >> ~/sdpo_run/log 2>&1 < /dev/null 9>&- & $STARTED"
}

outcome() {
  ssh_to 0 "$ALIVE $OUTCOME outcome" || true  # Empty: it cannot be reached.
  [[ -z $dry ]] || echo 0
}

# Reports that a check failed, and gives up after too many in a row.
miss() {
  misses=$((misses + 1))
  if ((misses >= MISSES)); then
    echo "$1 $misses times in a row: giving up. The slice $name is kept, and the run may go on: check with" \
      "'$0 status …' and 'gcloud compute tpus tpu-vm describe $name --zone=$zone', then watch again, or delete it." >&2
    exit 5
  fi
  echo "$1 ($misses of $MISSES times): trying again." >&2
}

restart() {
  if start; then
    misses=0
  else
    miss "The run could not be started on all workers of the slice $name"
  fi
}

watch() {
  need_command
  need_type
  local now code
  while true; do
    now=$(state)
    if [[ -z $now ]]; then
      echo "The state of the slice $name cannot be read; trying again." >&2
    elif [[ $now == SUSPENDING || $now == SUSPENDED || $now == FAILED ]]; then
      echo "The slice $name is $now: requesting it again; the run resumes from its last checkpoint." >&2
      on_slice queued-resources delete --force --quiet || true
      create
      install
      start
      misses=0
    elif [[ $now == ACTIVE ]]; then
      code=$(outcome)
      case $code in
        running) misses=0 ;;
        0)
          [[ -n $dry ]] || echo 'The run is done.' >&2
          return
          ;;
        70 | 75 | 143)  # launch.train: no progress; a worker is gone; told to stop. All resume.
          echo "The run ended with exit code $code: starting it again; it resumes from its last checkpoint." >&2
          restart
          ;;
        lost)
          echo 'The run on worker 0 is gone without an exit code (killed, out of memory, or the worker was' \
            'rebooted): starting it again; it resumes from its last checkpoint.' >&2
          restart
          ;;
        'not started')
          echo 'No run has been started on worker 0: starting it.' >&2
          restart
          ;;
        [0-9]*)
          echo "The run ended with exit code $code; the end of worker 0's log:" >&2
          ssh_to 0 'tail -n 30 ~/sdpo_run/log' >&2 || true
          exit "$((code > 3 ? 1 : code))"
          ;;
        *) miss "Worker 0 of the slice $name could not be reached, though the slice is ACTIVE," ;;
      esac
    fi
    [[ -n $dry ]] || sleep "$poll"
  done
}

verb=${1:-}
command=()
(($# == 0)) || shift
case $verb in
  create | install | start | watch | run | logs | status | stop | delete) read_flags "$@" ;;
  --help | -h | help) usage && exit ;;
  '') usage >&2 && exit 2 ;;
  *) complain "$verb is not run, create, install, start, watch, logs, status, stop or delete (--help says more)." ;;
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
    describe
    ssh_to all "$ALIVE $OUTCOME $STATUS"
    ;;
  stop) ssh_to all "$ALIVE $STOP" ;;
  delete) on_slice queued-resources delete --force --quiet ;;
esac
