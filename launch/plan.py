"""Estimates a run's memory and time on a TPU slice, without a TPU.

  python -m launch.plan --config=configs/qwen3_8b_chemistry.py --topology=v5e:8x8
  python -m launch.plan --config=… --topology=v5e:4x4 --search --output=plan.json
  python -m launch.plan --config=… --config.model.lora.rank=16 --topology=v5e:2x4 --engine

Compiles every program of the run (with --engine: of the engine that the settings serve.… describe) with the TPU
compiler, and prints memory by kind, time by phase, communication, utilisation and cost. No weights are needed, but
libtpu is (requirements-tpu.txt). docs/performance.md explains the numbers.
"""

from absl import flags

from sdpo_jax import command
from sdpo_jax.errors import UserError

TOPOLOGY = flags.DEFINE_string('topology', None, 'The slice: v5e:8x8, v5e:1x1 (one chip), v6e:4x4, …', required=True)
OUTPUT = flags.DEFINE_string('output', None, 'JSON file for all numbers.')
MODEL_CONFIG = flags.DEFINE_string('model_config', None, 'A config.json that is used instead of that of model.path.')
ALL = flags.DEFINE_bool(
  'all', False, 'Compile every bucket and cache stage, not only the largest of each kind and those that a step runs.'
)
SEARCH = flags.DEFINE_bool(
  'search', False, 'Try other meshes, micro-batches, remat and rows decoded at once; rank them.'
)
SEARCH_OVER = flags.DEFINE_list(
  'search_over', None, 'What --search varies: mesh, micro_batch, remat, rows; all of it if unset.'
)
PRICE = flags.DEFINE_float(
  'price',
  None,
  'US dollars per chip-hour; if unset, plan.price_per_chip_hour or else an on-demand list price of one region (v5e '
  '1.20, v6e 2.70, v5p 4.20), which may not be yours.',
  lower_bound=0.0,
)
LENGTHS = flags.DEFINE_string(
  'lengths', None, 'Directory or metrics.jsonl of a run whose measured lengths replace the settings plan.….'
)
KEEP = flags.DEFINE_string(
  'keep', None, "Folder in which the compiler's results are kept, so that planning a program again takes seconds."
)
ENGINE = flags.DEFINE_bool('engine', False, 'Plan the engine of many adapters that serve.… describes, not a run.')
command.define_config()
command.define_adapter('As in launch.train.')


def main() -> None:
  """Plan a run, or with --engine a service, and print the plan."""
  from sdpo_jax.planner import run
  from sdpo_jax.serving import pricing

  run.compile_only()
  common = dict(
    output=OUTPUT.value,
    model_config=MODEL_CONFIG.value,
    price=PRICE.value,
    keep=KEEP.value,
    announce=command.announce,
    show=print,
  )
  if ENGINE.value:
    if SEARCH.value or ALL.value or LENGTHS.value is not None:
      raise UserError('--engine cannot be combined with --search, --all or --lengths: leave them out.')
    pricing.plan(command.load_config(), TOPOLOGY.value, **common)
    return
  run.plan(
    command.load_config(),
    TOPOLOGY.value,
    everything=ALL.value,
    search_over=(SEARCH_OVER.value or run.SEARCHED) if SEARCH.value else (),
    lengths_of=LENGTHS.value,
    **common,
  )


if __name__ == '__main__':
  command.run(main)
