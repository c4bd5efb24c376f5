"""The settings of the continual-distillation service around its engine: address, storage, limits, learning."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sdpo_jax.config.fields import setting
from sdpo_jax.config.ranges import BYTES, MIB, NOT_NEGATIVE, POSITIVE, REQUESTS, SECONDS, TOKENS, VERSIONS, Range
from sdpo_jax.objective_settings import ALPHA


@dataclasses.dataclass
class HttpConfig:
  host: str = setting(
    '127.0.0.1', 'Address to listen on. Another one than that of this machine alone needs serve.http.keys.'
  )
  port: int = setting(8420, 'Port to listen on; 0: a free one, which is printed.', Range(at_least=0, at_most=65535))
  keys: str | None = setting(
    None,
    'File of API keys, made by launch.serve_key; it is read again when it changes. None: no key, one owner, and '
    'requests must name this machine as their host.',
  )
  allowed_hosts: tuple[str, ...] = setting(
    (), 'Names in the header Host that are answered, beside those of this machine. With keys and empty: all.'
  )
  allowed_origins: tuple[str, ...] = setting(
    (),
    'Web pages, as https://HOST, whose scripts may ask; browsers send them in the header Origin. Others are refused.',
  )
  max_body_mb: float = setting(16.0, 'Largest body of a request; that of an imported adapter included.', MIB)
  deadline_s: float = setting(
    300.0, 'Time in which a request must be answered, unless its header X-Deadline-Ms says less.', SECONDS
  )
  read_timeout_s: float = setting(
    30.0, 'Time in which the headers, and then each further part of a body, must arrive.', SECONDS
  )
  max_requests: int = setting(64, 'Requests that are worked on at once; more are refused with 429.', REQUESTS)
  idle_shutdown_s: float | None = setting(
    None, 'Time without a request after which the service ends. None: never.', SECONDS
  )
  drain_s: float = setting(
    30.0,
    'Time that requests under way get to finish when the service is told to stop.',
    Range(at_least=0, unit='seconds'),
  )
  log_bodies: bool = setting(
    False, 'Write what is asked and answered into the log. It holds prompts, completions and feedback then.'
  )


@dataclasses.dataclass
class StoreConfig:
  root: str = setting(
    'runs/service', 'Where versions of adapters are kept: a local folder, s3://… or gs://…; one service at a time.'
  )
  database: str | None = setting(
    None,
    'SQLite file, local, with samples, requests and an index of the versions. None: service.sqlite in a local root; it '
    'must be named for others.',
  )
  keep_versions: int = setting(
    0,
    'Versions of an adapter that are kept beside its first and its newest one; 0: all of them.',
    Range(at_least=0, unit='versions'),
  )
  sample_ttl_s: float = setting(
    7 * 86400.0, 'How long a completion can be given feedback on by its sample_id.', SECONDS
  )
  request_ttl_s: float = setting(86400.0, 'How long an Idempotency-Key is remembered with its answer.', SECONDS)
  keep_feedback_texts: bool = setting(
    False, 'Keep what users say of completions beside the versions that it made. The numbers are kept in any case.'
  )


@dataclasses.dataclass
class LimitsConfig:
  tokens_per_minute: int | None = setting(
    None, 'Tokens that a key may have sampled, scored and learned in a minute, on average. None: any number.', TOKENS
  )
  burst_tokens: int | None = setting(
    None,
    'How many it may have had at once after a pause. None: those of a minute, serve.limits.tokens_per_minute.',
    TOKENS,
  )
  max_waiting: int = setting(256, 'Requests that wait for the engine; more are refused with 429.', REQUESTS)
  max_adapters_per_owner: int = setting(1000, 'Adapters of one owner.', Range(above=0, unit='adapters'))
  max_items: int = setting(64, 'Completions that one feedback is about, at most.', Range(above=0, unit='completions'))
  max_steps: int = setting(16, 'Optimizer steps of one feedback, at most.', Range(above=0, unit='steps'))
  max_samples: int = setting(128, 'Completions of one request, n, at most.', Range(above=0, unit='completions'))
  max_logprobs: int = setting(
    20,
    'Log-probs at a position that the OpenAI-compatible routes give at most; never more than serve.topk.',
    Range(at_least=0, unit='tokens'),
  )
  max_sessions_per_adapter: int = setting(
    1000, 'Sessions of one adapter that are kept.', Range(above=0, unit='sessions')
  )
  max_turns_per_session: int = setting(
    1000, 'Proposals of one session, denied ones included.', Range(above=0, unit='turns')
  )
  max_message_bytes: int = setting(
    1_000_000,
    'Bytes of the messages, results, correction or arguments that one request adds to a session, at most.',
    BYTES,
  )
  max_tools_bytes: int = setting(200_000, 'Bytes of the tools that a session declares, written as JSON.', BYTES)


@dataclasses.dataclass
class LearningConfig:
  """The defaults of learning from a feedback."""

  loss: Literal['sdpo', 'jsd_pg'] = setting(
    'sdpo', "'sdpo': the divergence from the teacher; 'jsd_pg': a policy gradient towards the mixture of both."
  )
  learning_rate: float = setting(3e-5, 'Step size of AdamW.', POSITIVE)
  steps: int = setting(1, 'Optimizer steps of a feedback.', Range(above=0, unit='steps'))
  alpha: float = setting(
    0.5,
    "Of 'sdpo'. 0: KL(teacher‖student), 1: KL(student‖teacher), between: generalised Jensen–Shannon. 'jsd_pg' has its "
    'own, mirrored.',
    Range(at_least=ALPHA[0], at_most=ALPHA[1]),
  )
  topk: int | None = setting(None, 'K, tokens of the support of the divergence. None: serve.topk.', TOKENS)
  is_clip: float | None = setting(
    2.0, 'Upper clip of the importance ratio of the sampled token; None: no ratio.', POSITIVE
  )
  jsd_alpha: float = setting(0.5, "Of 'jsd_pg': the student's share of the mixture.", Range(above=0, below=1))
  clip_eps: float = setting(0.2, "Of 'jsd_pg': clip of the ratio.", Range(above=0, below=1))
  jsd_weight: float = setting(0.5, "Of 'jsd_pg': weight of its regulariser.", NOT_NEGATIVE)
  betas: tuple[float, ...] = setting((0.9, 0.999), 'Decay rates of the moments of AdamW.', Range(at_least=0, below=1))
  weight_decay: float = setting(0.01, 'Decoupled weight decay of the factors.', NOT_NEGATIVE)
  max_grad_norm: float = setting(1.0, 'Norm to which gradients are clipped.', POSITIVE)
  teacher: Literal['live', 'ema', 'lagged', 'base', 'frozen'] = setting(
    'live',
    "Who reads the feedback, of an adapter that names nobody. 'live': the version itself; 'ema': the average of its "
    "versions; 'lagged': an older one; 'base': the model without an adapter; 'frozen': version 0.",
  )
  average_rate: float = setting(
    0.05, "How far the average of 'ema' moves with every version.", Range(at_least=0, at_most=1)
  )
  lag: int = setting(8, "How many versions 'lagged' is behind.", VERSIONS)


@dataclasses.dataclass
class GuardsConfig:
  """The default limits beyond which a feedback is rejected, if neither the adapter nor the request sets others."""

  max_kl_to_base: float | None = setting(
    2.0,
    "Mean divergence per token from the model without an adapter on the user's canary prompts. None: any.",
    POSITIVE,
  )
  min_entropy: float | None = setting(0.01, 'Mean entropy per token on these. None: any.', NOT_NEGATIVE)
  max_loss_ratio: float | None = setting(
    10.0, "Loss over the median of the adapter's last ones with the same parameters, from four on. None: any.", POSITIVE
  )
  max_self_similarity: float | None = setting(
    0.9,
    'Mean overlap of completions of different canary prompts, 1 if they are all the same. None: any.',
    Range(above=0, at_most=1),
  )
  canary_tokens: int = setting(32, 'Tokens of a completion of a canary prompt.', TOKENS)
