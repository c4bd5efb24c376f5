"""Cartridges at scale: a document of up to 100 000 tokens in 2048 trained slots, for models of 1B to 8B parameters.

  python -m launch.prepare_data --source=longhealth --input=benchmark_v5.json --output=data/longhealth
  python -m launch.synthesize --config=configs/cartridge.py:model=llama3_2_3b --count=65536 \\
      --output=data/longhealth/prompts.jsonl
  python -m launch.train --config=configs/cartridge.py:model=llama3_2_3b
  python -m launch.plan --config=configs/cartridge.py:model=llama3_2_3b --config.plan.document_tokens=98304 \\
      --topology=v5e:2x4

  python -m launch.synthesize --config=configs/cartridge.py:document=report.txt --count=65536 --output=prompts.jsonl
  python -m launch.train --config=configs/cartridge.py:document=report.txt,tokens=1024,prompts=prompts.jsonl,questions=

model      llama3_2_1b, llama3_2_3b, llama3_1_8b; qwen3_1_7b, qwen3_4b, qwen3_8b; qwen2_5_7b; mistral_7b; gemma3_4b
document   text file, local or gs://…, which must fit into the model's context
tokens     number of slots, a multiple of 16, so that the cartridge can be served
prompts    rows or lines of text to answer; `python -m launch.synthesize` writes them
questions  rows for evaluations, which `python -m launch.prepare_data --source=longhealth` makes; empty: none

The settings are those that the authors of cartridges published (arXiv 2506.06266: 64 sequences of at most 1024 tokens
per step, Adam with a learning rate of 2e-2, the first slot frozen, 8 samples per question at temperature 0.3), with
deliberate differences: the student writes the answers, the teacher reads the whole document, the divergence is over the
whole vocabulary (its normaliser needs all logits anyway, so that the 20 most likely tokens would hardly be cheaper),
slots are trained in float32, and the learning rate warms up for 20 steps and decays along a cosine to a twentieth. With
`environments.profile='reference'` answers are graded as the authors do. None of these runs has been made with this
implementation yet.

The mesh is for a v5e slice of eight chips (2x4), each of which holds one key-value head of the document; models with
four key-value heads use two groups of four chips. For other devices set `--config.mesh.tensor`, to 1 on a single one.
The records of all ten LongHealth patients exceed the context of Qwen3 and Qwen2.5: take some of them only
(`--patients=patient_01`).
"""

from sdpo_jax.config import Config
from sdpo_jax.config.overrides import reset_unread
from sdpo_jax.configs import models, paper
from sdpo_jax.errors import UserError

FILE = 'configs/cartridge.py'
MODELS = (
  'llama3_2_1b', 'llama3_2_3b', 'llama3_1_8b', 'qwen3_1_7b', 'qwen3_4b', 'qwen3_8b', 'qwen2_5_7b', 'mistral_7b',
  'gemma3_4b',
)  # fmt: skip
# Model → number of devices, of eight, over which the key-value heads of the document are sharded.
TENSOR = dict.fromkeys(MODELS, 8) | {'qwen2_5_7b': 4, 'gemma3_4b': 4}
PAGE = 16  # Slots per page; servers cut off an incomplete page.


def get_config(
  model: str = 'llama3_2_3b',
  document: str = 'data/longhealth/document.txt',
  tokens: int | str = 2048,
  prompts: str = 'data/longhealth/prompts.jsonl',
  questions: str = 'data/longhealth/test.json',
) -> Config:
  """Return the run that trains slots on a document; the module's docstring lists the values of the arguments.

  Raises:
    UserError: an argument has a value that is not allowed.
  """
  paper.check_arguments(FILE, model=(model, TENSOR))
  slots = int(tokens) if str(tokens).isdecimal() else 0
  if not slots or slots % PAGE:
    raise UserError(f'{FILE}: tokens={tokens!r} must be a multiple of {PAGE} above 0, such as 2048.')
  if not document or not prompts:
    raise UserError(f'{FILE}: {"prompts" if document else "document"} is empty: name a file.')
  config = Config(name=f'cartridge_{model}_{slots}')
  models.choose(config, model)
  config.model.cartridge.tokens, config.model.cartridge.document = slots, document
  config.data.train_files, config.data.environment = (prompts,), 'none'
  config.data.val_files = (questions,) if questions else ()
  config.data.train_batch_size = 64
  config.data.max_prompt_length, config.data.prompt_buckets = 1024, (256, 1024)
  config.data.max_response_length, config.data.response_buckets = 512, (256, 512)
  config.data.filter_overlong_prompts = True
  config.rollout.n = 1
  config.rollout.max_batch_rows = 64
  config.val_kwargs.n = 8
  config.val_kwargs.temperature = 0.3
  config.val_kwargs.top_p = 1.0
  config.actor.ppo_mini_batch_size = 64
  config.actor.ppo_micro_batch_size = 8
  config.actor.pack_sequences = True
  sd = config.actor.self_distillation
  sd.teacher_context, sd.teacher_regularization = 'prompt', 'base'
  sd.alpha, sd.distillation_topk = 0.0, None
  config.algorithm.rollout_correction.rollout_is = None
  config.optimizer.lr = 2e-2
  config.optimizer.lr_warmup_steps = 20
  config.optimizer.lr_scheduler_type, config.optimizer.min_lr_ratio = 'cosine', 0.05
  config.trainer.total_training_steps = 1024  # 65,536 prompts, each used once.
  config.trainer.test_freq = 128 if questions else 0
  config.trainer.save_freq = 128
  config.plan.mean_prompt = 100.0
  config.mesh.fsdp, config.mesh.tensor = -1, TENSOR[model]
  return reset_unread(config)
