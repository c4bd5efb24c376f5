"""A teacher's context for one question."""

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.teacher import context
from sdpo_jax.types import Outcome
from tests.golden.tokenizer import CharacterTokenizer

QUESTION = [{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'Q'}]


def build(texts, scores, feedback=None, *, group=None, tokenizer=None, seed=0, step=0, sample_ids=None, **config):
  feedback = feedback or [None] * len(texts)
  return context.build_teacher_context(
    [QUESTION] * len(texts),
    [0] * len(texts) if group is None else group,
    texts,
    [Outcome(score=s, feedback=f) for s, f in zip(scores, feedback, strict=True)],
    SelfDistillationConfig(**config),
    tokenizer or CharacterTokenizer(),
    seed=seed,
    step=step,
    sample_ids=sample_ids,
    chat=ChatFormat(),
  )
