"""Every experiment of the SDPO paper (arXiv 2601.20802v2), selected by the arguments of one function.

  python -m launch.train --config=configs/paper.py:task=chemistry
  python -m launch.train --config=configs/paper.py:task=chemistry,model=olmo3_7b,method=grpo_on_policy
  python -m launch.train --config=configs/paper.py:task=livecodebench,teacher=frozen
  python -m launch.train --config=configs/paper.py:task=livecodebench,shown=feedback

task      chemistry, physics, biology, materials, tooluse (Section 3); livecodebench (Section 4)
model     qwen3_8b, olmo3_7b
method    sdpo; grpo (mini-batches of 8 questions); grpo_on_policy (one optimizer step per batch)
teacher   ema (the paper's choice), frozen, trust_region, live: Table 4, on livecodebench
shown     both (the paper's choice), solution, feedback, attempt (both, and the failed attempt): Table 6, on
          livecodebench
data      folder with <task>/train.json and <task>/test.json; `python -m launch.prepare_data` makes them

Hardware of the paper: one node of four GH200, about 120 s per step, 5 h per run (150 steps) for Section 3 and 90 steps
for LiveCodeBench (Table 4; Table 9 is at step 80 and Table 6 at step 60). The paper's numbers are in `PAPER` below, and
in docs/experiments.md next to the command of each.

There are two recipes. Section 3: Jensen–Shannon divergence, top-100, EMA 0.05, no feedback, one optimizer step per
batch. Section 4: reverse KL, top-20, EMA 0.01, feedback, 32 optimizer steps per batch. The settings are those of the
paper's Tables 12 and 13 and of the scripts of lasgroup/SDPO 0e6d510. Only these configs reproduce quirks of the
reference: the demonstration is the first success in length-balanced batch order, over-long teacher prompts are cut from
the right, every sequence has its own denominator, only closed blocks of thinking are removed from demonstrations,
messages may spell special tokens, and graders judge as in the reference.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

from sdpo_jax.config import Config
from sdpo_jax.config.fields import did_you_mean
from sdpo_jax.config.overrides import assign, reset_unread
from sdpo_jax.errors import UserError

Task = Literal['chemistry', 'physics', 'biology', 'materials', 'tooluse', 'livecodebench']
Model = Literal['qwen3_8b', 'olmo3_7b']
Method = Literal['sdpo', 'grpo', 'grpo_on_policy']
Teacher = Literal['ema', 'frozen', 'trust_region', 'live']
Shown = Literal['both', 'solution', 'feedback', 'attempt']

MODELS = {'qwen3_8b': 'Qwen/Qwen3-8B', 'olmo3_7b': 'allenai/Olmo-3-7B-Instruct'}
# Completions decoded at once on a v5e:8x8, if not the default: evaluations of Qwen3-8B have more questions than a
# batch. Every head of Olmo 3 has its own keys and values, so that the cache of a token is 3.6 times as large as that of
# Qwen3-8B (512 KiB instead of 144 KiB in bfloat16).
MAX_BATCH_ROWS = {'Qwen/Qwen3-8B': 384, 'allenai/Olmo-3-7B-Instruct': 128}

# Task → the arguments of `launch.prepare_data` that make its data.
PREPARED = {
  'chemistry': '--source=sciknoweval --domain=chemistry',
  'physics': '--source=sciknoweval --domain=physics',
  'biology': '--source=sciknoweval --domain=biology',
  'materials': '--source=sciknoweval --domain=material',
  'tooluse': '--source=tooluse --input=TOOLALPACA_DATA',
  'livecodebench': '--source=livecodebench',
}
# (task, model) → per cent before training, and the best within one and within five hours of each `Method`: mean@16.
TABLE_3 = {
  ('chemistry', 'qwen3_8b'): (41.2, (73.2, 80.9), (65.9, 74.5), (63.3, 63.4)),
  ('physics', 'qwen3_8b'): (59.2, (66.6, 75.6), (63.8, 72.7), (63.6, 63.6)),
  ('biology', 'qwen3_8b'): (30.8, (50.6, 56.8), (35.1, 59.9), (49.8, 49.8)),
  ('materials', 'qwen3_8b'): (58.9, (72.1, 78.4), (74.3, 77.1), (73.9, 74.1)),
  ('tooluse', 'qwen3_8b'): (57.5, (68.0, 68.5), (64.9, 67.7), (60.2, 65.7)),
  ('chemistry', 'olmo3_7b'): (22.8, (68.0, 80.0), (39.7, 56.7), (51.4, 57.5)),
  ('physics', 'olmo3_7b'): (37.7, (59.9, 66.1), (55.3, 63.3), (62.7, 62.7)),
  ('biology', 'olmo3_7b'): (16.2, (48.0, 52.8), (35.6, 55.8), (49.8, 49.8)),
  ('materials', 'olmo3_7b'): (36.7, (73.7, 79.1), (70.9, 75.0), (73.3, 73.5)),
  ('tooluse', 'olmo3_7b'): (39.3, (60.8, 62.1), (56.4, 65.0), (56.8, 60.6)),
}
# (task, model, method) → per cent before training, and at the times of Table 3. LiveCodeBench: before training and at
# step 80, mean@4 of `score`: Table 9.
PAPER = {
  (task, model, method): (before, *best)
  for (task, model), (before, *of_methods) in TABLE_3.items()
  for method, best in zip(get_args(Method), of_methods, strict=True)
} | {
  ('livecodebench', 'qwen3_8b', 'sdpo'): (27.9, 48.8),
  ('livecodebench', 'qwen3_8b', 'grpo'): (27.9, 41.2),
}
# Teacher → best and average per cent until step 90, with standard errors of 3 seeds: Table 4.
PAPER_TEACHERS = {
  'live': ((36.1, 1.6), (29.8, 1.3)),
  'frozen': ((48.8, 0.7), (44.4, 0.2)),
  'trust_region': ((50.6, 0.9), (45.6, 0.2)),
  'ema': ((49.3, 0.3), (45.3, 0.2)),
}
# Context of the teacher → per cent of the initial teacher and of the student by step 60, with deviations: Table 6.
PAPER_SHOWN = {
  'feedback': ((32.5, 0.5), (39.9, 1.1)),
  'solution': ((42.4, 1.0), (42.6, 1.3)),
  'both': ((42.5, 1.2), (48.3, 1.4)),
  'attempt': ((39.3, 0.8), (44.5, 1.3)),
}

# (model, whether it is SDPO) → tokens of a completion on average: Table 8. GRPO's are on-policy.
PAPER_LENGTHS = {
  ('qwen3_8b', True): 255.8,
  ('qwen3_8b', False): 820.8,
  ('olmo3_7b', True): 343.9,
  ('olmo3_7b', False): 1095.4,
}
# Task → (average tokens of a prompt, estimated as characters ÷ 3; tokens of feedback in a teacher's prompt; test
# questions).
QUESTIONS = {
  'chemistry': (240, 0, 210),
  'physics': (290, 0, 80),
  'biology': (300, 0, 50),
  'materials': (370, 0, 94),
  'tooluse': (1080, 0, 68),
  'livecodebench': (700, 300, 131),
}
# Settings of the two recipes. Section 3 (science and tool use): JSD, top-100 with tail, EMA 0.05, no feedback, one step
# per batch; Section 4 (LiveCodeBench v6): reverse KL, top-20, EMA 0.01, feedback, 32 optimizer steps per batch.
RECIPES = {
  'data.response_buckets': ((2560, 4096, 8192), (1024, 4096, 8192)),
  'data.reprompt_buckets': ((1536, 10240), (2560, 10240)),
  'val_kwargs.n': (16, 4),
  'actor.ppo_mini_batch_size': (32, 1),
  'optimizer.lr': (1e-5, 1e-6),
  'optimizer.lr_warmup_steps': (10, 0),
  'trainer.total_training_steps': (150, 90),
  'actor.self_distillation.alpha': (0.5, 1.0),
  'actor.self_distillation.distillation_topk': (100, 20),
  'actor.self_distillation.teacher_update_rate': (0.05, 0.01),
  'actor.self_distillation.include_environment_feedback': (False, True),
}


def get_config(
  task: str = 'chemistry',
  model: str = 'qwen3_8b',
  method: str = 'sdpo',
  teacher: str = 'ema',
  shown: str = 'both',
  data: str = 'data',
) -> Config:
  """Return the experiment with these arguments; the module's docstring lists their values.

  Raises:
    UserError: an argument has a value that is not allowed, or the paper has no such experiment.
  """
  kinds = {'task': (task, Task), 'model': (model, Model), 'method': (method, Method)}
  kinds |= {'teacher': (teacher, Teacher), 'shown': (shown, Shown)}
  check_arguments('configs/paper.py', **{name: (value, get_args(kind)) for name, (value, kind) in kinds.items()})
  ablated = (teacher, shown) != ('ema', 'both')
  if ablated and (task, method) != ('livecodebench', 'sdpo'):
    raise UserError(
      'configs/paper.py: teacher=… and shown=… are ablations of SDPO on livecodebench (Tables 4 and 6): use them with '
      'task=livecodebench,method=sdpo, or set actor.self_distillation.… of another task on the command line.'
    )
  if task == 'livecodebench' and method == 'grpo_on_policy':
    raise UserError('configs/paper.py: the paper has no on-policy GRPO on livecodebench: use method=grpo.')
  config = recipe(f'{model}_{task}', MODELS[model], task, data, method)
  _as_the_reference(config)
  if ablated:
    _ablate(config, teacher, shown)
  plan_lengths(config, task, PAPER_LENGTHS[model, method == 'sdpo'])
  return reset_unread(config)


def check_arguments(file: str, **arguments: tuple[str, Collection[str]]) -> None:
  """Raise UserError if an argument of a config, given as (value, allowed values), has a value that is not allowed."""
  for name, (value, allowed) in arguments.items():
    if value not in allowed:
      raise UserError(f'{file}: {name}={value!r} is none of {", ".join(allowed)}{did_you_mean(value, allowed)}')


def experiments() -> list[dict[str, str]]:
  """Return the arguments of every experiment of the paper, without repetitions."""
  main = [dict(zip(('task', 'model', 'method'), key, strict=True)) for key in PAPER]
  code = {'task': 'livecodebench'}
  return [
    *main,
    *({**code, 'teacher': teacher} for teacher in PAPER_TEACHERS if teacher != 'ema'),
    *({**code, 'shown': shown} for shown in PAPER_SHOWN if shown != 'both'),
  ]


def recipe(name: str, model: str, task: str, data: str, method: str = 'sdpo') -> Config:
  """Return the paper's settings for a task with any model, without quirks of the reference.

  Args:
    name: name of the run.
    model: path of the model.
    task: one of `Task`.
    data: folder with <task>/train.json and <task>/test.json.
    method: one of `Method`.
  """
  config = Config(name=name)
  config.model.path = model
  config.data.train_files, config.data.val_files = (f'{data}/{task}/train.json',), (f'{data}/{task}/test.json',)
  config.data.train_batch_size = 32
  config.data.max_prompt_length = 2048
  config.data.max_response_length = 8192
  config.data.filter_overlong_prompts = True
  if 'Qwen3' in model:
    config.data.enable_thinking = False  # Other templates have no such variable.
  # 2 × 3 × 2 declared lengths; a micro-batch is padded to the smallest that are large enough. Those of Section 3 hold
  # a whole step of packed samples; a batch of LiveCodeBench, of one question, is shorter, and shows feedback.
  config.data.prompt_buckets = (512, 2048)
  config.rollout.n = 8
  config.rollout.temperature = 1.0
  config.rollout.max_batch_rows = MAX_BATCH_ROWS.get(model, config.rollout.max_batch_rows)
  config.val_kwargs.temperature = 0.6
  config.val_kwargs.top_p = 0.95
  config.actor.loss_agg_mode = 'token-mean'
  config.actor.pack_sequences = True
  config.algorithm.rollout_correction.rollout_is = 'token'
  config.algorithm.rollout_correction.rollout_is_threshold = 2.0
  config.optimizer.betas = (0.9, 0.999)
  config.optimizer.weight_decay = 0.01
  config.optimizer.grad_clip = 1.0
  config.trainer.test_freq = 5
  config.trainer.val_before_train = False
  sd = config.actor.self_distillation
  sd.max_reprompt_len = 10240
  sd.is_clip = 2.0
  sd.success_reward_threshold = 0.5
  for setting, of_sections in RECIPES.items():
    assign(config, setting, of_sections[task == 'livecodebench'])
  if method != 'sdpo':
    _grpo(config, on_policy=method == 'grpo_on_policy')
  return config


def _as_the_reference(config: Config) -> None:
  """Set behaviour of the reference code that is not in the paper."""
  config.data.split_special_tokens = False
  config.actor.loss_group_size = 1
  config.optimizer.skip_empty_steps = False
  config.trainer.batch_order = 'balanced'
  config.trainer.balance_partitions = 4
  config.environments.profile = 'reference'
  sd = config.actor.self_distillation
  sd.demonstration = 'first'
  sd.thinking_rule = 'closed'
  sd.reprompt_truncation = 'right'


def _grpo(config: Config, *, on_policy: bool) -> None:
  """Set up the baseline: dual-clip PPO, advantages not divided by the standard deviation, settings of Table 13."""
  config.name += '_grpo_on_policy' if on_policy else '_grpo'
  loss = config.actor.policy_loss
  loss.loss_mode = 'vanilla'
  loss.clip_ratio_low = 0.2
  loss.clip_ratio_high = 0.28
  loss.clip_ratio_c = 3.0
  loss.norm_adv_by_std_in_grpo = False
  config.actor.ppo_mini_batch_size = 32 if on_policy else 8
  config.optimizer.lr = 1e-5 if on_policy else 1e-6
  config.trainer.val_before_train = True


def plan_lengths(config: Config, task: str, mean_completion: float) -> None:
  """Set the lengths that `launch.plan` assumes; a teacher's prompt holds the question, an answer and the feedback."""
  prompt, feedback, questions = QUESTIONS[task]
  config.plan.mean_completion = mean_completion
  config.plan.mean_prompt = float(prompt)
  config.plan.mean_reprompt = prompt + mean_completion + feedback
  config.plan.evaluation_questions = questions


def _ablate(config: Config, teacher: str, shown: str) -> None:
  """Set up a variant of Table 4 or 6."""
  config.name += ''.join(f'_{part}' for part, usual in ((teacher, 'ema'), (shown, 'both')) if part != usual)
  sd = config.actor.self_distillation
  sd.teacher_regularization = teacher.replace('_', '-')
  if teacher == 'trust_region':
    sd.teacher_update_rate = 0.01
  sd.include_demonstration = shown != 'feedback'
  sd.include_environment_feedback = shown != 'solution'
  sd.include_failed_attempt = shown == 'attempt'


def markdown() -> str:
  """Return the content of docs/experiments.md: every experiment with its command and the paper's numbers."""
  lines = [
    '# The experiments of the paper',
    '',
    'Made by `python -m configs.paper > docs/experiments.md`. Every line is one command; add `--workdir=…` and any',
    '`--config.setting=value`. Hardware of the paper: one node of four GH200 (about 120 s a step). None of these runs '
    'has',
    "been repeated with this implementation yet: the numbers are the paper's (arXiv 2601.20802v2).",
    '',
    'Data, from the [public sources](data.md):',
    '',
    '<!-- not run: needs a network -->',
    '```bash',
    *(f'python -m launch.prepare_data {source} --output=data/{task}' for task, source in PREPARED.items()),
    '```',
    '',
    'Other models with the same recipes: `configs/models.py`.',
  ]
  code = 'livecodebench', 'qwen3_8b', 'sdpo'
  tables = {
    'Science and tool use: Table 3, mean@16 in per cent, before / best within 1 h / 5 h': [
      _line(key, PAPER[key]) for key in PAPER if key[0] != 'livecodebench'
    ],
    'LiveCodeBench v6: Table 9, `score` mean@4 in per cent, before / at step 80': [
      _line(key, PAPER[key]) for key in PAPER if key[0] == 'livecodebench'
    ],
    'Teachers: Table 4, best / average per cent until step 90': [
      _line(code, _spread(values), f',teacher={teacher}') for teacher, values in PAPER_TEACHERS.items()
    ],
    'What the teacher is shown: Table 6, per cent of the initial teacher / of the student by step 60': [
      _line(code, _spread(values), f',shown={shown}') for shown, values in PAPER_SHOWN.items()
    ],
  }
  for title, rows in tables.items():
    lines += ['', f'## {title}', '', '| command | paper |', '|---|---|', *rows]
  return '\n'.join(lines) + '\n'


def _spread(values: Sequence[tuple[float, float]]) -> list[str]:
  return [f'{value} ± {error}' for value, error in values]


def _line(key: tuple[str, str, str], numbers: Sequence[Any], more: str = '') -> str:
  task, model, method = key
  arguments = f'task={task},model={model},method={method}{more}'
  return f'| `python -m launch.train --config=configs/paper.py:{arguments}` | {" / ".join(map(str, numbers))} |'


if __name__ == '__main__':
  print(markdown(), end='')
