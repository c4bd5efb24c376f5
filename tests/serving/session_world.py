"""A service whose tiny model has a chat template with tools, and says what a test lets it say.

What the engine computes is real: log-probs, teachers, steps. Only what is drawn is the test's, since a random model
proposes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import json
import pathlib

import numpy as np
import transformers

from sdpo_jax.models import checksums
from sdpo_jax.rollout.results import Completion, Draft
from sdpo_jax.serving.service import Service
from tests import tiny
from tests.serving.service_world import make_config, model_folder, running

# Roles of one letter: the prompts of the service that tests share have 64 bytes.
TEMPLATE = (
  '{# Calls: <tool_call> {"name": …, "arguments": …} </tool_call> #}'
  '{% if tools %}<|im_start|>s\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}'
  '{% for message in messages %}<|im_start|>{{ message.role[0] }}\n{{ message.content }}<|im_end|>\n{% endfor %}'
  '{% if add_generation_prompt %}<|im_start|>a\n{% endif %}'
)
GREP, READ = '{"name": "g", "arguments": {"p": "x"}}', '{"name": "r", "arguments": {"p": "a"}}'
GREP_A = '{"name": "g", "arguments": {"p": "a"}}'
TOOLS = [{'type': 'function', 'function': {'name': name, 'parameters': {'type': 'object'}}} for name in 'gr']


def called(*calls: str) -> str:
  """Return what a model of the form of Hermes writes to call tools."""
  return ''.join(f'<tool_call>\n{call}\n</tool_call>' for call in calls)


def tool_model(folder: pathlib.Path, calls: Sequence[str] = (GREP, READ, GREP_A)) -> pathlib.Path:
  """Make the tiny model with that template in a folder; tags and these calls are one token each."""
  model = model_folder(folder)
  tiny.make_tokenizer(model, TEMPLATE)
  path = model / 'tokenizer.json'
  described = json.loads(path.read_text())
  first = 1 + max(token['id'] for token in described['added_tokens'])
  for number, text in enumerate(('<tool_call>', '</tool_call>', *calls)):
    described['added_tokens'].append({**described['added_tokens'][0], 'id': first + number, 'content': text} | _TEXT)
  path.write_text(json.dumps(described))
  checksums.write(model)
  return model


_TEXT = {'special': False, 'normalized': False}


class Script:
  """What the model is going to say, in order."""

  def __init__(self, service: Service):
    self._service, self._texts = service, []
    self.asked: list[tuple[str, list[int]]] = []  # Version and prompt of every proposal.
    self.measures = True  # Whether log-probs are computed; otherwise they are 0.
    self.reused = 0  # Tokens of a prompt whose keys and values are said to have been there.

  @property
  def left(self) -> int:
    """How many texts have not been asked for."""
    return len(self._texts)

  def say(self, *texts: str, ended: bool = True) -> None:
    """Lets the model say these texts, each with the end of its turn or cut by its length."""
    tokenizer = self._service.tokenizer
    end = [tokenizer.eos_token_id] if ended else []
    self._texts += [tokenizer.encode(text, add_special_tokens=False) + end for text in texts]

  def forget(self) -> None:
    """Lets the model say nothing of what it has not said yet."""
    self._texts = []

  def sample(self, version, prompt, *, drafts=False, **options) -> _Drawn:
    """Stands in the place of `Worker.sample`."""
    tokens = self._texts.pop(0)
    self.asked.append((version, list(prompt)))
    if not self.measures:
      zeros = np.zeros(len(tokens), np.float32)
      return _Drawn(np.asarray(tokens, np.int32), zeros, zeros, drafts, self.reused)
    [said] = self._service.worker.score(version, [(list(prompt), tokens)], topk=0).result()
    return _Drawn(np.asarray(tokens, np.int32), said.log_probs, said.entropy, drafts, self.reused)


class _Drawn:
  """A handle of a completion that was drawn at once."""

  def __init__(self, tokens, log_probs, entropy, drafts, reused):
    self.cancelled, self._drafts, self.reused, self.drawing = False, drafts, reused, self
    self._done = Completion(0, tokens, log_probs, log_probs, entropy, stopped=True, text='', reused=reused)

  def __iter__(self) -> Iterator[Draft | Completion]:
    if self._drafts:
      yield Draft(0, self._done.tokens[:1])
    yield self._done

  def result(self) -> list[Completion]:
    return [self._done]


@contextlib.contextmanager
def world(
  folder: pathlib.Path, *, calls: Sequence[str] = (GREP, READ, GREP_A), **changes
) -> Iterator[tuple[Service, Script]]:
  """Give a service that is ready, and what its model says."""
  config = make_config(tool_model(folder / 'model', calls), folder / 'root')
  config.serve.guards.min_entropy = None
  for name, value in changes.items():
    setattr(config.serve, name, value)
  with running(config) as service:
    script = Script(service)
    service.worker.sample = script.sample
    yield service, script


def tokenizer(folder: pathlib.Path, template: str, **settings) -> transformers.PreTrainedTokenizerFast:
  """Return a byte-level tokenizer with a chat template, and control tokens named like this in it."""
  tiny.make_tokenizer(folder, template)
  made = transformers.AutoTokenizer.from_pretrained(folder)
  made.add_special_tokens(settings or {})
  return made
