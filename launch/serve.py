"""Serves a model to many users, each with adapters that learn from feedback.

  python -m launch.serve --config=configs/serve_quickstart.py
  python -m launch.serve --config=configs/lora.py:model=qwen3_8b,task=chemistry \\
      --config.serve.store.root=gs://BUCKET/service --config.serve.store.database=/var/lib/sdpo/service.sqlite \\
      --config.serve.http.host=0.0.0.0 --config.serve.http.keys=keys.jsonl

The port is open at once, and /readyz answers 200 when all programs are compiled; docs/serving.md is the introduction.
On a loopback address no key is needed; on any other one is (python -m launch.serve_key). --help_settings=serve
lists all settings.

Exit codes: 0 told to stop by SIGTERM or Ctrl-C, or idle (serve.http.idle_shutdown_s): requests under way were finished
within serve.http.drain_s, and all that was acknowledged is stored; 2 bad input, named in a sentence; 130, 143 told a
second time, and ended at once.
"""

from sdpo_jax import command, extras

command.define_config()


def main() -> None:
  extras.check('serve')
  from sdpo_jax.serving.web.server import ServiceProcess

  config = command.load_config(trains=False)
  ServiceProcess(config, command.announce).run()


if __name__ == '__main__':
  command.run(main)
