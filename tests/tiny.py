"""A model directory, a task and a config small enough to train in seconds, built from nothing."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sdpo_jax.config import ModelConfig
from sdpo_jax.models import checksums, huggingface
from sdpo_jax.rollout.results import Completion
from sdpo_jax.types import Rollouts
from tests import compiling, forked_commands

REPOSITORY = forked_commands.REPOSITORY
SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
CHAT_TEMPLATE = (
  '{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}'
  '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)

# A task of its own, registered in the config file: bytes are graded by a rule, so about half the completions succeed.
CONFIG = """
from sdpo_jax.config import Config
from sdpo_jax.environments import registry
from sdpo_jax.types import Example, Outcome


@registry.register('parity')
def grade(examples, completions, *, truncated):
  scores = [float(sum(text.encode()) % 2) for text in completions]
  return [
    Outcome(score, '' if score else 'The sum of the bytes must be odd.', {'pred': text[:4], 'acc': score})
    for score, text in zip(scores, completions)
  ]


@registry.register_generator('parity')
def questions(split, seed):
  def example(index):
    return Example(
      f'{split}-{index}', [{'role': 'user', 'content': f'Q{index * 2 + (split == "test")}'}], 'parity', None, 'parity'
    )
  return example


def get_config():
  config = Config(name='tiny')
  config.model.path = {model!r}
  config.model.dtype = 'float32'
  config.model.remat = 'none'
  config.data.train_files = ('generator:parity',)
  config.data.val_files = ('generator:parity',)
  config.data.val_max_samples = 2
  config.data.train_batch_size = 2
  config.data.max_prompt_length = 32
  config.data.prompt_buckets = (32,)
  config.data.max_response_length = 4
  config.data.response_buckets = (4,)
  config.data.reprompt_buckets = (256,)
  config.rollout.n = 4
  config.val_kwargs.n = 2
  config.actor.ppo_mini_batch_size = 2
  config.actor.ppo_micro_batch_size = 4
  config.actor.self_distillation.max_reprompt_len = 256
  config.actor.self_distillation.distillation_topk = 8
  config.algorithm.rollout_correction.rollout_is = None
  config.optimizer.lr = 1e-3
  config.optimizer.lr_warmup_steps = 2
  config.trainer.total_training_steps = 3
  config.trainer.test_freq = 2
  config.trainer.save_freq = 1
  config.trainer.tensorboard = False
  return config
"""


def make_tokenizer(folder: pathlib.Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
  """Write a byte-level tokenizer with a ChatML template."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {token: i for i, token in enumerate([*alphabet, *SPECIAL])}
  tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(list(SPECIAL))
  tokenizer.save(str(folder / 'tokenizer.json'))
  settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>'}
  if chat_template is not None:
    settings['chat_template'] = chat_template
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))


def make_model(folder: pathlib.Path, *, vocab_size: int = 264, seed: int = 0, **changes) -> pathlib.Path:
  """Return a random Qwen3 of two layers and width 32 in Hugging Face format."""
  config = {
    'architectures': ['Qwen3ForCausalLM'],
    'model_type': 'qwen3',
    'vocab_size': vocab_size,
    'hidden_size': 32,
    'intermediate_size': 64,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 8,
    'rms_norm_eps': 1e-6,
    'rope_theta': 10000.0,
    'tie_word_embeddings': True,
    'max_position_embeddings': 512,
    'hidden_act': 'silu',
    'attention_bias': False,
    'use_sliding_window': False,
    'eos_token_id': vocab_size - 6,
    'initializer_range': 0.1,
    **changes,
  }
  policy, parameters = huggingface.init(config, jax.random.key(seed), ModelConfig(dtype='float32'))
  huggingface.save(folder, policy, parameters, dtype='float32')
  (folder / 'config.json').write_text(json.dumps(config))
  make_tokenizer(folder)
  checksums.write(folder)
  return folder


def make_experiment(folder: pathlib.Path) -> pathlib.Path:
  """Return a model directory and a config file that trains it; returns the path of the config file."""
  model = make_model(folder / 'model')
  path = folder / 'tiny_config.py'
  path.write_text(CONFIG.replace('{model!r}', repr(str(model))))
  return path


def completions(rollouts: Rollouts) -> list[Completion]:
  """Return what the sampler says of each of these rollouts when it is finished; without tokens."""
  none = np.zeros(0, np.float32)
  return [
    Completion(sample, none.astype(np.int32), none, none, none, stopped=reason == 'stop', text=text)
    for sample, (reason, text) in enumerate(zip(rollouts.finish_reason, rollouts.text, strict=True))
  ]


def command(name: str, *arguments: str) -> list[str]:
  """Return the command line of `python -m launch.<name>`."""
  return [sys.executable, '-m', f'launch.{name}', *arguments]


def environment(cache: pathlib.Path | None = None, *, quick: bool = False) -> dict[str, str]:
  """Environment variables of a command: CPU, one device, programs kept in `cache`, which all share by default.

  `quick`: compiled as the tests do, not as users do. For what runs by default, for runs of several processes, which
  have no cache, and where no other test compiles these programs and none compares their bits.
  """
  return {
    **(os.environ if quick else compiling.users_environment()),
    'JAX_PLATFORMS': 'cpu',
    'JAX_COMPILATION_CACHE_DIR': str(cache or compiling.commands_cache()),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'HF_HUB_OFFLINE': '1',
  }


def launch(
  name: str,
  *arguments: str,
  cache: pathlib.Path | None = None,
  quick: bool = False,
) -> subprocess.CompletedProcess[str]:
  """Run a command to its end."""
  return forked_commands.run(command(name, *arguments)[1:], environment(cache, quick=quick))


def launch_many(
  commands: list[tuple[str, list[str]]],
  *,
  cache: pathlib.Path | None = None,
  quick: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
  """Run commands one after another."""
  return [launch(name, *arguments, cache=cache, quick=quick) for name, arguments in commands]
