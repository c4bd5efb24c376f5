"""Writes prompts about a document, for the training of a cartridge.

  python -m launch.synthesize --config=configs/report.py --document=report.txt --output=prompts.parquet --count=2048
  python -m launch.train --config=configs/report.py --config.data.train_files=prompts.parquet

The model of the config, without the config's cartridge or adapter, reads a random window of the document, as a system
message where the chat template has one, and a request of a random seed type, and writes what a user might ask: see
docs/cartridges.md. The file has rows as runs read them, with the environment `none`, the seed type as their data source
(`dataset`), and the window (`window_start`, `window_end`, tokens of the document, and `window_digest` of its text).

  structuring    asks for a part as JSON, YAML, TOML, INI, XML or plain text, with exact names, dates and numbers
  summarization  asks for a summary of a part that it names
  question       asks for a fact, a detail, or what two statements say together
  use_case       asks for help with a task of somebody who works with the document
  creative       asks for something imaginative about its content
  generic        asks anything; drawn only if --seed_types names it

The same seed gives the same prompts. An interrupted command continues where it stopped when it is repeated; finished
prompts are in OUTPUT.parts meanwhile, and OUTPUT appears when it is complete. Several processes (the flags below)
sample together, and process 0 writes. With --endpoint_url a model behind an OpenAI-compatible endpoint writes the
prompts, the same ones for a seed if the server heeds it; of the config's model only the tokenizer is loaded, and no
accelerator is used.
"""

import contextlib
import dataclasses

from absl import flags
import jax

from sdpo_jax import command
from sdpo_jax.config import Config, FeedbackEndpointConfig
from sdpo_jax.data import self_study
from sdpo_jax.errors import UserError
from sdpo_jax.inference import synthesis
from sdpo_jax.inference.endpoint_writer import EndpointWriter

DEFAULTS = synthesis.SynthesisOptions(count=1)
OUTPUT = flags.DEFINE_string('output', None, 'File to write, .jsonl or .parquet; local or gs://….', required=True)
OVERWRITE = flags.DEFINE_bool(
  'overwrite', False, 'Replace an --output, or what a command with other settings has left, that is there already.'
)
DOCUMENT = flags.DEFINE_string(
  'document', None, 'Text file, local or gs://…; model.cartridge.document of the config if unset.'
)
MODEL = flags.DEFINE_string('model', None, 'Model that writes the prompts; model.path of the config if unset.')
flags.DEFINE_integer('count', 2048, 'Prompts to write.', lower_bound=1)
flags.DEFINE_integer('seed', DEFAULTS.seed, 'Seed of windows, requests and sampling.', lower_bound=0)
SEED_TYPES = flags.DEFINE_list(
  'seed_types', list(DEFAULTS.seed_types), f'Kinds of requests, of {", ".join(self_study.REQUESTS)}.'
)
SEED_WEIGHTS = flags.DEFINE_list(
  'seed_weights', [], 'How often each is drawn, relative to the others; equally if unset.'
)
flags.DEFINE_integer('min_window', DEFAULTS.min_window, 'Tokens of the shortest window, if not --windows.', 1)
flags.DEFINE_integer('max_window', DEFAULTS.max_window, 'Tokens of the longest window of the document.', lower_bound=1)
flags.DEFINE_integer(
  'windows', None, 'Number of different windows, of --max_window tokens each and evenly spaced; any if unset.', 1
)
flags.DEFINE_integer(
  'per_window',
  DEFAULTS.per_window,
  'Prompts that are drawn for a window and a request, which is read once for them.',
  1,
)
flags.DEFINE_float('temperature', DEFAULTS.temperature, 'Sampling temperature.', lower_bound=0.0)
flags.DEFINE_integer(
  'max_tokens', DEFAULTS.max_tokens, 'Tokens of a prompt as it is written; what is cut off there is left out.', 1
)
MAX_BATCH_ROWS = flags.DEFINE_integer(
  'max_batch_rows',
  None,
  'Prompts that are drawn at once; if unset, as many as take no more memory than the cache and the document of the '
  'run.',
  lower_bound=1,
)
_SERVER = FeedbackEndpointConfig()
ENDPOINT = flags.DEFINE_string('endpoint_url', '', 'Endpoint that writes the prompts, e.g. http://localhost:8000/v1.')
flags.DEFINE_string('endpoint_model', '', 'Name of the model on that server.')
flags.DEFINE_string('endpoint_api_key_env', '', 'Environment variable with its bearer token; empty: none is sent.')
flags.DEFINE_float('endpoint_timeout_s', _SERVER.timeout_s, 'Time limit of an answer in seconds.', lower_bound=0.1)
flags.DEFINE_integer('endpoint_retries', _SERVER.retries, 'Further attempts after a failure.', lower_bound=0)
flags.DEFINE_integer('endpoint_concurrency', _SERVER.concurrency, 'Maximum number of concurrent requests.', 1)
command.define_config()
command.define_cluster()


def main() -> None:
  """Let the model ask and answer questions on the document, and write the rows to --output."""
  config = command.load_config()
  config.model.path = config.model.path if MODEL.value is None else MODEL.value
  if ENDPOINT.value:
    jax.config.update('jax_platforms', 'cpu')  # An accelerator may be in use, by the server for instance.
  else:
    command.join_cluster()
  document = config.model.cartridge.document if DOCUMENT.value is None else DOCUMENT.value
  if not document:
    raise UserError('--document is not given and model.cartridge.document of the config is empty: name a text file.')
  kinds, weights = tuple(SEED_TYPES.value), tuple(map(weight, SEED_WEIGHTS.value))
  options = command.from_flags(synthesis.SynthesisOptions, seed_types=kinds, seed_weights=weights)
  writer = endpoint_writer(config, options)
  with writer or contextlib.nullcontext():
    synthesis.synthesize(
      config,
      options,
      document=document,
      output=OUTPUT.value,
      max_batch_rows=MAX_BATCH_ROWS.value,
      writer=writer,
      overwrite=OVERWRITE.value,
      announce=announce,
    )


def endpoint_writer(config: Config, options: synthesis.SynthesisOptions) -> EndpointWriter | None:
  """Return the model behind the endpoint of the flags; None if there is none.

  Raises:
    UserError: flags are given that are not read with, or without, an endpoint, or as in `EndpointWriter`.
  """
  names = [f'endpoint_{field.name}' for field in dataclasses.fields(FeedbackEndpointConfig)]
  other = ('max_batch_rows', 'coordinator_address', 'num_processes', 'process_id') if ENDPOINT.value else names
  if unread := [name for name in other if flags.FLAGS[name].present]:
    why = 'With --endpoint_url, which one process asks,' if ENDPOINT.value else 'Without an address in --endpoint_url,'
    raise UserError(f'{why} --{unread[0]} has no effect: leave it out.')
  settings = FeedbackEndpointConfig(*(flags.FLAGS[name].value for name in names))
  return EndpointWriter(settings, options, config.rollout.stop) if ENDPOINT.value else None


def weight(text: str) -> float:
  """Parse an entry of --seed_weights.

  Raises:
    UserError: it is not a number.
  """
  try:
    return float(text)
  except ValueError as error:
    raise UserError(f'--seed_weights holds {text!r}, which is not a number.') from error


def announce(text: str) -> None:
  """Print a message on the first process only, as all have the same to say."""
  if jax.process_index() == 0:
    command.announce(text)


if __name__ == '__main__':
  command.run(main)
