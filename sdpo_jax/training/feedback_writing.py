"""Written feedback on the failures of a generation batch, by the trained model or by a server."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
import logging

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.config.overrides import with_limits
from sdpo_jax.distributed.collectives import divided
from sdpo_jax.distributed.stopping import Stop
from sdpo_jax.errors import UserError
from sdpo_jax.teacher.feedback_endpoint import SECTION, FeedbackEndpoint
from sdpo_jax.teacher.written_feedback import (
  UnwrittenError,
  WriterRequest,
  ask,
  feedback_prompt_len,
  read,
  rows_to_write,
)
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import chat_format, declared_buckets, objective_spec
from sdpo_jax.types import TrainState

NOISE = 0x5EEDBAC  # Added to the seed, so that feedback and the completion of the same number have different noise.


def is_used(config: Config) -> bool:
  """Return whether a model writes feedback in this run."""
  return bool(config.actor.self_distillation.feedback_model) and objective_spec(config).reprompts


def writes_itself(config: Config) -> bool:
  """Return whether the trained model writes the feedback."""
  return is_used(config) and config.actor.self_distillation.feedback_model == 'self'


def sampler_settings(config: Config) -> Config:
  """Return the settings of the sampler of feedback: its prompts ask for feedback, its completions are the feedback.

  Prompts have the teacher's buckets if they have the same length limit. The run's stop strings do not end feedback.
  """
  sd = config.actor.self_distillation
  buckets = declared_buckets(config).reprompt if sd.feedback_max_prompt_len is None else ()
  return with_limits(config, feedback_prompt_len(sd), buckets, sd.feedback_max_tokens, stop=())


def opened(config: Config) -> contextlib.AbstractContextManager[FeedbackEndpoint | None]:
  """Return a context manager for the endpoint that writes feedback, not contacted yet; it gives None if none is set.

  Raises:
    UserError: no address is set, or an environment variable is missing.
  """
  if not is_used(config) or writes_itself(config):
    return contextlib.nullcontext()
  return FeedbackEndpoint(config.actor.self_distillation)


def write(session: Session, graded: GradedRollouts, state: TrainState, seed: int, step: int, stop: Stop) -> None:
  """Add a model's feedback on the failures of a graded batch to their outcomes, the same on all processes.

  A completion without such feedback keeps its grader's feedback.

  Args:
    session: session of the run.
    graded: completions with their outcomes, which get `written` or `unwritten`.
    state: state whose parameters write, if the trained model does.
    seed: seed of the run's noise.
    step: step of the batch.
    stop: whether the run is to stop; pending requests are then abandoned.

  Raises:
    UserError: none of the feedback could be written; the state is intact.
    StoppedError: `stop` asked the run to stop; the state is intact.
  """
  config, rollouts = session.config, graded.rollouts
  sd = config.actor.self_distillation
  found: dict[int, str | UnwrittenError] = {}
  asked: list[WriterRequest] = []
  chat = chat_format(config)
  for row in rows_to_write(rollouts.group, rollouts.text, graded.outcomes, sd):
    question = graded.examples[rollouts.group[row]].messages
    try:
      asked.append(ask(row, question, rollouts.text[row], graded.outcomes[row].feedback, sd, session.tokenizer, chat))
    except UnwrittenError as error:
      found[row] = error
  if asked and writes_itself(config):
    found |= _by_model(session, graded, state, asked, seed, step, stop)
  elif asked:
    found |= _by_endpoint(session.feedback_endpoint, asked, stop)
  for row, said in found.items():
    field = {'unwritten': str(said)} if isinstance(said, UnwrittenError) else {'written': said}
    graded.outcomes[row] = dataclasses.replace(graded.outcomes[row], **field)
  _check(session, found, step)


def _by_model(
  session: Session,
  graded: GradedRollouts,
  state: TrainState,
  asked: Sequence[WriterRequest],
  seed: int,
  step: int,
  stop: Stop,
) -> dict[int, str | UnwrittenError]:
  """Return the trained model's feedback by row; its noise depends on the step and the sample's number."""
  sd = session.config.actor.self_distillation
  rows = {int(graded.sample_ids[each.row]): each.row for each in asked}
  written = session.feedback_sampler.stream(
    session.base,
    state.trainable,
    [each.tokens for each in asked],
    numbers=list(rows),
    between=stop.check,
    n=1,
    seed=int(np.random.SeedSequence([seed, NOISE]).generate_state(1)[0]),
    step=step,
    max_tokens=sd.feedback_max_tokens,
    temperature=sd.feedback_temperature,
  )
  found: dict[int, str | UnwrittenError] = {}
  for done in written:
    try:
      found[rows[done.sample]] = read(done.text)
    except UnwrittenError as error:
      found[rows[done.sample]] = error
  return {each.row: found[each.row] for each in asked}


def _by_endpoint(
  endpoint: FeedbackEndpoint, asked: Sequence[WriterRequest], stop: Stop
) -> dict[int, str | UnwrittenError]:
  """Return a server's feedback by row; every process requests its share."""

  def write(share: Sequence[int]) -> list[str | UnwrittenError]:
    return endpoint.write([asked[place] for place in share], stop)

  written = divided(range(len(asked)), write, 'the end of writing feedback')
  return {each.row: text for each, text in zip(asked, written, strict=True)}


def _check(session: Session, found: dict[int, str | UnwrittenError], step: int) -> None:
  """Log how much feedback could not be written.

  Raises:
    UserError: none could be written. (Not raised if a server fails on a single completion, nor after the first step if
      the model itself writes, since it would fail in the same way after every resume.)
  """
  reasons = [str(said) for said in found.values() if isinstance(said, UnwrittenError)]
  if not reasons:
    return
  own = writes_itself(session.config)
  if len(reasons) == len(found) and (step == 1 if own else len(found) > 1):
    section = 'actor.self_distillation'
    way_out = (
      f'change {section}.feedback_prompt_template or raise {section}.feedback_max_tokens, and start in another '
      '--workdir'
      if own
      else f'see that {session.feedback_endpoint.public_url} ({SECTION}.url) answers, then start the same command again'
    )
    raise UserError(f'No feedback was written on any of {len(found)} failures: {reasons[0]}; {way_out}.')
  logging.warning('No feedback was written on %d of %d failures; the first: %s.', len(reasons), len(found), reasons[0])
