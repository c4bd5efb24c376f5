"""Check of a run before it starts, in seconds and without compiling anything."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json

from etils import epath
import jax
import numpy as np

from sdpo_jax.command_lines import command_line
from sdpo_jax.config import Config, rewards
from sdpo_jax.config.conditions import unread_remarks
from sdpo_jax.data import sources
from sdpo_jax.data.prompts import Tokenizer
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError, printable
from sdpo_jax.evaluation import alarms
from sdpo_jax.evaluation.known_metrics import check_best_metric
from sdpo_jax.models import huggingface, model_files
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models.adapters.kv_prefix import without_bank
from sdpo_jax.models.policy import Policy
from sdpo_jax.preflight import grader_trials, memory, prompt_lengths
from sdpo_jax.preflight.doubtful_settings import odd_settings
from sdpo_jax.tables import aligned
from sdpo_jax.teacher.context import build_teacher_context, shorten_middle
from sdpo_jax.teacher.signal import check_base
from sdpo_jax.training import chunk_bank, endpoint_teacher, feedback_writing, teacher_model
from sdpo_jax.training.directory import fingerprint, lost_checkpoints
from sdpo_jax.training.directory.published_checkpoints import newest
from sdpo_jax.training.directory.workdir import check_workdir
from sdpo_jax.training.documents import read_at_once, read_texts
from sdpo_jax.training.opening import check_turn_end, load_tokenizer, model_mesh, template_remarks
from sdpo_jax.training.questions import held_out_questions, training_questions
from sdpo_jax.training.room import check_reprompts, check_room, check_writer
from sdpo_jax.training.run_programs import abstract_parameters
from sdpo_jax.training.specs import chat_format, objective_spec, teacher_spec
from sdpo_jax.types import Example, Outcome

SHOWN = 3  # Questions for which prompts are shown and graders are tried.
LONGEST = 3000  # Characters of a prompt that are shown.
FULL = 0.9  # Fraction of a device's memory above which an estimate looks odd.
PLACEHOLDER = '(A successful answer to the same question goes here.)'


@dataclasses.dataclass
class CheckReport:
  """The report of a check: sections of text, and whatever looks odd."""

  sections: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # Title and text.
  odd: list[str] = dataclasses.field(default_factory=list)  # One sentence for each thing that looks like a mistake.

  def add(self, title: str, text: str, odd: Sequence[str]) -> None:
    """Add a section, and what looks odd in it."""
    self.sections.append((title, text))
    self.odd += odd

  def text(self) -> str:
    """Return the report for a terminal, with odd findings at its end."""
    parts = [f'━━ {title} ━━\n{text}' for title, text in self.sections]
    found = '\n'.join(f'• {sentence}' for sentence in self.odd) or 'Nothing looks odd.'
    whole = '\n\n'.join([*parts, f'━━ What looks odd ━━\n{found}'])
    return printable(whole, None, keep='\n\t\xa0\u3000\u200c\u200d')  # Prompts may hold anything.


def check(config: Config, workdir: epath.PathLike | None = None) -> CheckReport:
  """Check a planned run: devices, model, memory, prompts, graders, settings.

  Reads only config.json and the tokenizer of the model directory.

  Args:
    config: settings.
    workdir: directory of a run to be resumed with the settings; None: a new run.

  Raises:
    UserError: any error that would end the run at its start, except weights that are missing, damaged, or do not belong
      to an adapter or a run.
  """
  alarms.rules(config.alarms.rules, evaluates=bool(config.trainer.test_freq))
  spec = objective_spec(config)
  root = model_files.resolve(config.model.path, weights=False)
  local = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(root)))
  policy = huggingface.read_policy(root, local.model)
  tokenizer = load_tokenizer(local)
  check_turn_end(local, tokenizer)
  mesh = model_mesh(local, policy)
  if teacher_model.is_used(config):
    teacher_model.check(local)
  elif spec.reads_teacher:
    check_base(teacher_spec(config), abstract_parameters(policy, mesh)[0])
  policy = policy.on(mesh, config.model.attention)
  with endpoint_teacher.opened(local) as endpoint, feedback_writing.opened(local):
    if endpoint is not None:
      endpoint_teacher.check(endpoint, local, tokenizer)
  report = CheckReport()

  document = 0
  if config.model.cartridge.used:
    read = read_texts(local, tokenizer, teaches=spec.reads_teacher).document
    document = 0 if read is None else read_at_once(local, len(read))
  report.add('Model and devices', *_machine(local, policy, mesh, document))
  # Files of environments.modules register the graders and generators named by rows and sources.
  with Graders(config.environments) as graders:
    training = prompt_lengths.training_questions(config)
    held_out = held_out_questions(local, tokenizer, any_length=True) if config.trainer.test_freq else []
    report.add('Lengths of prompts', *_lengths(tokenizer, training, held_out, config))
    examples = prompt_lengths.spread(training, SHOWN)
    graders.prepare({example.environment for example in (*training, *held_out)})
    tasks = {example.data_source for example in held_out}
    check_best_metric(config.trainer.best_metric, tasks, config.val_kwargs.n, config.alarms.epistemic_words)
    check_reprompts(tokenizer, training, config, spec)
    check_room(tokenizer, _short(tokenizer, training, config), config, spec)
    check_writer(tokenizer, training, config, spec)
    graders.check_questions([*training, *held_out])
    chunk_bank.check(local, tokenizer, training, held_out)
    report.odd += graders.unread_remarks([*training, *held_out])
    trials = grader_trials.attempt(graders, _one_of_each(examples, training, held_out))
    changed = None if workdir is None else _resumed(config, local, workdir, tokenizer, graders)
  threshold = config.actor.self_distillation.success_reward_threshold
  report.add('Graders', _trials(trials), grader_trials.odd_trials(trials, threshold))
  report.add('Prompts', *_prompts(tokenizer, trials[: len(examples)], config))
  described = json.loads((root / 'config.json').read_text(encoding='utf-8'))
  if changed is not None:
    nothing = (
      'Nothing has changed that a resumed run would report.'
      if newest(workdir)
      else 'There is no checkpoint here: the run would begin at step 0.'
    )
    report.add(f'Resuming {workdir}', '\n'.join(changed) or nothing, changed)
  report.odd += [*template_remarks(config, tokenizer), *unread_remarks(config)]
  report.odd += odd_settings(config, mesh.size, huggingface.positions(described))
  return report


def _short(tokenizer: Tokenizer, training: Sequence[Example], config: Config) -> list[Example]:
  """Return the questions within the run's length limits, among those that are measured."""
  chosen = prompt_lengths.spread(training, prompt_lengths.MEASURED)
  tokens = prompt_lengths.student_tokens(tokenizer, chosen, config)
  limit = config.data.max_prompt_length
  return [example for example, ids in zip(chosen, tokens, strict=True) if len(ids) <= limit]


def _resumed(
  config: Config, local: Config, workdir: epath.PathLike, tokenizer: Tokenizer, graders: Graders
) -> list[str]:
  """Return the changes that a run resumed in this directory would report; raise UserError for forbidden ones."""
  iterator = training_questions(config, tokenizer)
  held_out = held_out_questions(config, tokenizer) if config.trainer.test_freq else []
  parts = fingerprint.take(local, tokenizer, iterator, held_out, graders, weights=False)
  workdir = check_workdir(config, workdir)
  lost_checkpoints.check_not_lost(workdir)
  return list(fingerprint.compare(workdir, config, parts).lines)


def _one_of_each(chosen: Sequence[Example], *others: Sequence[Example]) -> list[Example]:
  """Return the chosen questions, plus one for every other set of graders, regardless of weights."""
  known = {_graders(example) for example in chosen}
  added = {_graders(example): example for examples in others for example in reversed(examples)}
  return [*chosen, *(example for graders, example in added.items() if graders not in known)]


def _graders(example: Example) -> frozenset[str]:
  return frozenset(rewards.names([example.environment]))


def _machine(config: Config, policy: Policy, mesh: jax.sharding.Mesh, document: int) -> tuple[str, list[str]]:
  table = policy.parameter_table()
  device = mesh.devices.flat[0]
  count, learned = map(parameter_tables.count, (without_bank(table), parameter_tables.trainable(table)))
  axes = ' × '.join(f'{name} {size}' for name, size in mesh.shape.items())
  found = memory.estimate(config, policy, mesh, document)
  room = memory.of_device(device)
  rows = [
    [name, when, memory.readable(size)]
    for when, part in (('always', found.held), ('while sampling', found.sampling), ('in an update', found.update))
    for name, size in part.items()
  ]
  rows.append(['peak', '', memory.readable(found.peak)])
  kind = '' if device.device_kind.lower() == device.platform else f' ({device.device_kind})'
  trained = '' if learned == count else f', {learned:,} of them trained'
  processes = 'process' if jax.process_count() == 1 else 'processes'
  has = 'not known' if room is None else memory.readable(room)
  lines = [
    f'{mesh.size} × {device.platform}{kind}, mesh {axes}, {jax.process_count()} {processes}',
    f'{count:,} parameters{trained}, computed in {config.model.dtype}',
    '',
    aligned(['memory', 'when', 'per device'], rows),
    f'memory of each device: {has}',
    'An estimate by arithmetic: the temporaries of an update can be twice that; for TPUs, '
    f'{command_line("plan")} asks the compiler.',
  ]
  odd = []
  if room is not None and found.peak > FULL * room:
    odd.append(
      f'The run holds about {memory.readable(found.peak)} on each device, which has {memory.readable(room)}: take more '
      'devices, or lower actor.ppo_micro_batch_size, rollout.max_batch_rows or the limits of lengths.'
    )
  return '\n'.join(lines), odd


def _lengths(
  tokenizer: Tokenizer, training: Sequence[Example], held_out: Sequence[Example], config: Config
) -> tuple[str, list[str]]:
  data = config.data
  texts, odd = [], []
  for setting, examples in (('data.train_files', training), ('data.val_files', held_out)):
    if not examples:
      continue
    found = prompt_lengths.measure(tokenizer, examples, config, setting)
    texts.append(prompt_lengths.histogram(found))
    if found.over:
      what = 'they are left out' if data.filter_overlong_prompts else 'the run would end at its start'
      odd.append(
        f'{found.over:.1%} of the prompts of {setting} are longer than data.max_prompt_length={data.max_prompt_length} '
        f'tokens: {what}; the longest has {found.tokens.max()}.'
      )
    elif found.tokens.max() * 4 < data.max_prompt_length:
      odd.append(
        f'data.max_prompt_length={data.max_prompt_length} is more than four times the longest prompt of {setting}, '
        f'{found.tokens.max()} tokens: a lower limit needs less memory.'
      )
  endless = bool(data.source_weights) or any(map(sources.is_generator, data.train_files))
  if not endless and len(training) < data.train_batch_size:
    odd.append(
      f'data.train_files hold {len(training)} rows, fewer than data.train_batch_size={data.train_batch_size}: the run '
      'would end at its start.'
    )
  asked = {_question(example) for example in training}
  shared = sum(_question(example) in asked for example in held_out)
  if shared and not config.model.cartridge.used:  # Because its answers are not trained on.
    odd.append(f'{shared} of {len(held_out)} held-out questions are also asked in training: their scores say little.')
  return '\n\n'.join(texts), odd


def _question(example: Example) -> str:
  return json.dumps(example.messages)


def _trials(trials: Sequence[grader_trials.GraderTrial]) -> str:
  rows = [
    [
      trial.example.id,
      trial.example.environment,
      '–' if trial.right is None else grader_trials.score(trial.right),
      grader_trials.score(trial.empty),
    ]
    for trial in trials
  ]
  table = aligned(['question', 'environment', 'score of the ground truth', 'of an empty answer'], rows)
  unknown = sorted({trial.example.environment for trial in trials if trial.right is None})
  note = f'\n–: no answer can be made of the ground truth ({", ".join(unknown)}).' if unknown else ''
  return table + note


def _prompts(
  tokenizer: Tokenizer, trials: Sequence[grader_trials.GraderTrial], config: Config
) -> tuple[str, list[str]]:
  """Return the student's and the teacher's prompts of a few questions, and findings."""
  taught = objective_spec(config).reprompts
  texts, odd = [], []
  for trial in trials:
    example = trial.example
    [student] = prompt_lengths.student_tokens(tokenizer, [example], config)
    parts = [f'{prompt_lengths.title(example)}\n── student, {len(student)} tokens ──\n{_shown(tokenizer, student)}']
    if taught:
      try:
        parts += [
          f'── teacher, who is shown {what}, {len(tokens)} tokens ──\n{_shown(tokenizer, tokens)}'
          for what, tokens in _teacher(tokenizer, trial, config)
        ]
      except UserError as error:
        odd.append(f'A prompt of the teacher cannot be built: {error}')
    texts.append('\n'.join(parts))
  return '\n\n'.join(texts), list(dict.fromkeys(odd))


def _teacher(tokenizer: Tokenizer, trial: grader_trials.GraderTrial, config: Config) -> list[tuple[str, list[int]]]:
  """Return the teacher's prompts about an empty answer, with a successful other answer and without one."""
  sd = config.actor.self_distillation
  success = Outcome(max(1.0, sd.success_reward_threshold))
  failure = Outcome(sd.success_reward_threshold - 1.0, trial.empty.feedback)
  found = []
  for texts, outcomes in (([trial.answer or PLACEHOLDER, ''], [success, failure]), ([''], [failure])):
    context = build_teacher_context(
      [trial.example.messages] * len(texts),
      np.zeros(len(texts), int),
      texts,
      outcomes,
      sd,
      tokenizer,
      seed=config.seed,
      step=0,
      chat=chat_format(config),
    )
    if context.mask[-1]:
      what = 'a demonstration' if context.solutions[-1] is not None else 'the feedback on an empty answer'
      found.append((what, list(context.prompt_tokens[-1])))
  return found


def _shown(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
  text = prompt_lengths.visible(tokenizer, tokens)
  return shorten_middle(text, LONGEST, f'\n[… {len(text) - LONGEST:,} characters …]\n')
