"""A teacher behind an endpoint, which scores the completions of a batch; every process requests a share of them."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.distributed.collectives import divided
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.models import huggingface
from sdpo_jax.models.control_tokens import Tokenizer
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.teacher.endpoint import Endpoint, EndpointQuery
from sdpo_jax.training.specs import longest_teacher_prompt, objective_spec
from sdpo_jax.types import Rollouts, TeacherSignal

NO_TOKEN = -1


def opened(config: Config) -> contextlib.AbstractContextManager[Endpoint | None]:
  """Return a context manager for the teacher endpoint, which is not contacted yet; it gives None if none is set.

  Raises:
    UserError: no address is set, or an environment variable is missing.
  """
  support = objective_spec(config).external_support
  if support is None or not config.actor.self_distillation.teacher_endpoint.used:
    return contextlib.nullcontext()
  vocab_size = huggingface.read_policy(config.model.path, config.model).vocab_size
  settings = dataclasses.replace(config.actor.self_distillation.teacher_endpoint, top_k=support)
  return Endpoint(settings, vocab_size)


def check(endpoint: Endpoint, config: Config, tokenizer: Tokenizer) -> None:
  """Check that the server is the teacher that the settings describe.

  Raises:
    UserError: it serves another model, or does not accept a text as long as the longest row.
  """
  longest = longest_teacher_prompt(config) + config.data.max_response_length
  endpoint.check(config.model.path, tokenizer, longest)


def signal(
  endpoint: Endpoint,
  prompts: Sequence[Sequence[int]],
  rollouts: Rollouts,
  wanted: np.ndarray,
  spec: ObjectiveSpec,
  stop: Stop = NEVER,
) -> TeacherSignal:
  """Return the teacher's signal for completions; all processes of a run call this and get the same.

  Args:
    endpoint: the teacher.
    prompts: [N], the teacher's prompt of each completion.
    rollouts: N completions.
    wanted: [N] bool, the completions to score; the others get no signal.
    spec: terms of the loss.
    stop: whether the run is to stop; pending requests are then abandoned.

  Raises:
    UserError: on every process, if one of them could not get a completion scored.
    StoppedError: on every process, if one of them was told to stop before its answers arrived.
  """
  tokens, lengths = rollouts.completion_tokens, rollouts.completion_mask.sum(1)
  samples = np.flatnonzero(wanted & (lengths > 0))

  def score(share: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    rows = samples[share]
    asked = [EndpointQuery(prompts[row], tokens[row, : lengths[row]].tolist()) for row in rows]
    return [(each.token_ids, each.log_probs, each.target_log_probs) for each in endpoint.score(asked, stop)]

  shape = (*tokens.shape, spec.external_support)
  ids, log_probs = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
  found = divided(range(len(samples)), score, 'the end of scoring by the teacher')
  for row, (likeliest, values, of_targets) in zip(samples, found, strict=True):
    if spec.samples_divergence:
      likeliest, values = tokens[row, : lengths[row], None], of_targets[:, None]
    ids[row, : lengths[row]], log_probs[row, : lengths[row]] = likeliest, values
  return TeacherSignal(token_ids=ids, log_probs=log_probs)
