"""The settings of the continual-distillation service around its engine: address, storage, limits, learning."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sdpo_jax.config.fields import setting
from sdpo_jax.config.ranges import BYTES, MIB, NOT_NEGATIVE, POSITIVE, REQUESTS, SECONDS, TOKENS, VERSIONS, Range
from sdpo_jax.objective_settings import ALPHA

_FEEDBACKS = Range(above=0, unit='feedbacks')


@dataclasses.dataclass
class HttpConfig:
  """The HTTP server: address, keys, and limits of requests (docs/serving.md)."""

  host: str = setting('127.0.0.1', 'Address to listen on; one that other machines can reach needs serve.http.keys.')
  port: int = setting(8420, 'Port to listen on; 0: a free one, which is printed.', Range(at_least=0, at_most=65535))
  url: str | None = setting(
    None,
    'Where other replicas reach this one, which forward requests to it, as http://HOST:PORT; see serve.store.database.',
  )
  keys: str | None = setting(
    None,
    'File of API keys, written by launch.serve_key and read again when it changes, or postgresql://… with a table of '
    'them. None: no keys and one owner; requests must name this machine as their host.',
  )
  allowed_hosts: tuple[str, ...] = setting(
    (), 'Accepted values of the header Host, besides the names of this machine. Empty, with keys: all.'
  )
  allowed_origins: tuple[str, ...] = setting(
    (),
    'Origins, as https://HOST, of web pages whose scripts may send requests; others are refused.',
  )
  max_body_mb: float = setting(16.0, 'Maximum size of the body of a request, also of an imported adapter.', MIB)
  deadline_s: float = setting(
    300.0, 'Time limit of a request, unless its header X-Deadline-Ms sets a shorter one.', SECONDS
  )
  read_timeout_s: float = setting(
    30.0, 'Time limit for headers and each part of a body to arrive, and for a client to read on.', SECONDS
  )
  max_requests: int = setting(
    128,
    'Limit of requests handled at once; more are refused with status 429. A key leaves as many as it has.',
    REQUESTS,
  )
  max_bodies_mb: float = setting(512.0, 'Size of all bodies of requests in memory; keys share it likewise.', MIB)
  idle_shutdown_s: float | None = setting(
    None, 'Time without a request after which the service ends. None: never.', SECONDS
  )
  drain_s: float = setting(
    30.0,
    'Time that running requests have to finish when the service is told to stop.',
    Range(at_least=0, unit='seconds'),
  )
  operator: str | None = setting(None, 'Owner whose keys see the usage of all keys in /metrics, not only their own.')
  log_bodies: bool = setting(
    False, 'Log the bodies of requests and responses, which hold texts of users, except those with store: false.'
  )


@dataclasses.dataclass
class StoreConfig:
  """Where the service keeps adapter versions and requests, and for how long."""

  root: str = setting(
    'runs/service',
    'Folder of adapter versions: local, s3://… or gs://…; only one service may use it at a time, or its replicas.',
  )
  database: str | None = setting(
    None,
    'Samples, sessions, requests and an index of versions: a local SQLite file, or postgresql://… for any number of '
    'replicas, with a root that is no local folder. None: service.sqlite in root, if that is local; otherwise it must '
    'be set.',
  )
  keep_versions: int = setting(
    16,
    'Number of versions of an adapter to keep, besides its first, its newest and pinned ones; 0: all, until idle_s. Of '
    'one that learns all the time, up to twice as many.',
    Range(at_least=0, unit='versions'),
  )
  idle_s: float = setting(
    14 * 86400.0,
    'Time without a new version after which only the first, newest and pinned ones stay; the newest loses its moments.',
    SECONDS,
  )
  moments: Literal['float32', 'bfloat16', 'none'] = setting(
    'float32',
    "How the moments of an adapter's newest version and pinned ones are stored; 'none': learning begins with zeros "
    'whenever the engine has dropped them.',
  )
  sample_ttl_s: float = setting(
    7 * 86400.0, 'Time in which feedback on a completion can be given by its sample_id.', SECONDS
  )
  request_ttl_s: float = setting(86400.0, 'Time for which an Idempotency-Key and its response are kept.', SECONDS)
  keep_feedback_texts: bool = setting(
    False, 'Store the text of feedback with the version that was learned from it, as its details.texts.'
  )


@dataclasses.dataclass
class LimitsConfig:
  """Limits of what one key, request or session may use."""

  tokens_per_minute: int | None = setting(
    10_000_000, 'Tokens per minute that may be sampled, scored and learned with one key. None: any number.', TOKENS
  )
  tokens_per_day: int | None = setting(1_000_000_000, 'The same per day, in UTC. None: any number.', TOKENS)
  feedbacks_per_minute: int | None = setting(6_000, 'Feedbacks per minute with one key. None: any number.', _FEEDBACKS)
  feedbacks_per_day: int | None = setting(1_000_000, 'The same per day, in UTC. None: any number.', _FEEDBACKS)
  burst_tokens: int | None = setting(
    None,
    'Tokens that one key may use at once after a pause. None: tokens_per_minute.',
    TOKENS,
  )
  max_requests_per_key: int = setting(64, 'Requests of one key handled at once; no limit without keys.', REQUESTS)
  max_waiting: int = setting(
    512,
    'Jobs that may wait for the engine; more are refused with status 429. A key leaves as many as it has.',
    REQUESTS,
  )
  max_commits: int = setting(8, 'Versions that are written at once; keys take turns.', VERSIONS)
  max_adapters_per_owner: int = setting(1000, 'Adapters that one owner may have.', Range(above=0, unit='adapters'))
  max_items: int = setting(64, 'Completions that one feedback may be about.', Range(above=0, unit='completions'))
  max_steps: int = setting(16, 'Optimizer steps that one feedback may take.', Range(above=0, unit='steps'))
  max_samples: int = setting(128, 'Completions that one request may ask for, n.', Range(above=0, unit='completions'))
  max_logprobs: int = setting(
    20,
    'Log-probs per position that the OpenAI-compatible routes may return; never more than serve.topk.',
    Range(at_least=0, unit='tokens'),
  )
  max_sessions_per_adapter: int = setting(
    1000, 'Sessions that are stored of one adapter.', Range(above=0, unit='sessions')
  )
  max_turns_per_session: int = setting(
    1000, 'Proposals that one session may have, denied ones included.', Range(above=0, unit='turns')
  )
  max_message_bytes: int = setting(
    1_000_000,
    'Size of the messages, results, correction or arguments that one request may add to a session.',
    BYTES,
  )
  max_tools_bytes: int = setting(200_000, 'Size of the tools that a session may declare, as JSON.', BYTES)


@dataclasses.dataclass
class LearningConfig:
  """The defaults of learning from a feedback."""

  loss: Literal['sdpo', 'jsd_pg'] = setting(
    'sdpo', "'sdpo': the divergence from the teacher; 'jsd_pg': a policy gradient towards the mixture of both."
  )
  learning_rate: float = setting(3e-5, 'Step size of AdamW.', POSITIVE)
  steps: int = setting(1, 'Optimizer steps per feedback request.', Range(above=0, unit='steps'))
  alpha: float = setting(
    0.5,
    "For 'sdpo'. 0: KL(teacher‖student), 1: KL(student‖teacher), between: generalised Jensen–Shannon. 'jsd_pg' has "
    'its own, mirrored.',
    Range(at_least=ALPHA[0], at_most=ALPHA[1]),
  )
  topk: int | None = setting(None, 'K, tokens of the support of the divergence. None: serve.topk.', TOKENS)
  is_clip: float | None = setting(
    2.0, "Upper clip of the importance ratio by which a token's divergence is weighted; None: no ratio.", POSITIVE
  )
  jsd_alpha: float = setting(0.5, "For 'jsd_pg': the student's share of the mixture.", Range(above=0, below=1))
  clip_eps: float = setting(0.2, "For 'jsd_pg': the ratio is clipped to 1 ± clip_eps.", Range(above=0, below=1))
  jsd_weight: float = setting(0.5, "For 'jsd_pg': weight of its regulariser; 0: none.", NOT_NEGATIVE)
  betas: tuple[float, ...] = setting((0.9, 0.999), 'Decay rates of the moments of AdamW.', Range(at_least=0, below=1))
  weight_decay: float = setting(0.01, 'Decoupled weight decay of the factors.', NOT_NEGATIVE)
  max_grad_norm: float = setting(1.0, 'Maximum norm of the gradient; a larger one is scaled down to it.', POSITIVE)
  teacher: Literal['live', 'ema', 'lagged', 'base', 'frozen', 'endpoint'] = setting(
    'live',
    "Teacher of adapters that name none. 'live': the version itself; 'ema': the average of its versions; 'lagged': "
    "an older version; 'base': the model without an adapter; 'frozen': version 0; 'endpoint': the model behind "
    'actor.self_distillation.teacher_endpoint.',
  )
  teacher_pause_s: float = setting(
    10.0, "Time for which a teacher 'endpoint' that has failed three times in a row is not asked.", SECONDS
  )
  average_rate: float = setting(
    0.05, "Rate at which the average of 'ema' moves towards each new version.", Range(at_least=0, at_most=1)
  )
  lag: int = setting(8, "Number of versions that the teacher 'lagged' is behind.", VERSIONS)


@dataclasses.dataclass
class GuardsConfig:
  """The default limits beyond which a feedback is rejected, if neither the adapter nor the request sets others."""

  max_kl_to_base: float | None = setting(
    2.0,
    "Mean divergence per token from the model without an adapter on the user's canary prompts, nats. None: any.",
    POSITIVE,
  )
  min_entropy: float | None = setting(0.01, 'Smallest entropy per token on these, nats. None: any.', NOT_NEGATIVE)
  max_loss_ratio: float | None = setting(
    10.0,
    'Loss over the median of earlier ones with the same parameters, at least 0.1, once there are four. None: any.',
    POSITIVE,
  )
  max_self_similarity: float | None = setting(
    0.9,
    'Mean overlap of completions of different canary prompts; 1 if they are all the same. None: any.',
    Range(above=0, at_most=1),
  )
  max_rejected_rise: float | None = setting(
    None, 'Rise of the log-prob of an answer that was denied or edited in a session, nats. None: any.', NOT_NEGATIVE
  )
  max_ability_loss: float | None = setting(
    0.3,
    "Fall of the mean log-prob per token of the answers in canary_file, nats, from the base's. None: any.",
    POSITIVE,
  )
  canary_tokens: int = setting(32, 'Length of the completion of a canary prompt.', TOKENS)
  canary_file: str | None = setting(
    None,
    'File of rows with a prompt, a text or a conversation, and maybe the right answer. The prompts are the canary '
    'prompts of adapters without their own; the answers measure, for all adapters, what is left of general abilities.',
  )
