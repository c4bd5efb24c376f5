"""Serves a model whose adapters learn from their users' feedback.

  python -m launch.serve --config=configs/serve_quickstart.py
  python -m launch.serve --config=configs/lora.py:model=qwen3_8b,task=chemistry \\
      --config.serve.store.root=gs://BUCKET/service --config.serve.store.database=/var/lib/sdpo/service.sqlite \\
      --config.serve.http.host=0.0.0.0 --config.serve.http.keys=keys.jsonl

The port is open at once, and /readyz answers 200 when all programs are compiled; docs/serving.md is the introduction.
A loopback address needs no key, any other address does (python -m launch.serve_key). --help_settings=serve lists all
settings.

Exit codes: 0 stopped by SIGTERM or Ctrl-C, or idle (serve.http.idle_shutdown_s), after requests under way were given
serve.http.drain_s to finish and everything acknowledged was stored; 2 bad input, named in a sentence; 130 or 143 ended
at once by a second signal.
"""

from sdpo_jax import command, extras

command.define_config()


def main() -> None:
  """Serve until a signal or the idle timeout ends the service."""
  extras.check('serve')
  from sdpo_jax.serving.web.server import ServiceProcess

  config = command.load_config(trains=False)
  ServiceProcess(config, command.announce).run()


if __name__ == '__main__':
  command.run(main)
