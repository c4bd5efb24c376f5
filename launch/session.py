"""Runs an agent that learns when its tool calls are denied.

  python -m launch.session --config=configs/session_quickstart.py --workspace=DIR
  python -m launch.session --url=http://127.0.0.1:8420 --adapter=NAME --workspace=DIR
  python -m launch.session --resume
  python -m launch.session --workspace=DIR --script=FILE

It shows every tool call, asks whether to run it, and says what was learned from a denial. What the model and its tools
write is behind a margin (│), and no line of the program is. A choice is a key pressed by itself after its question:
what is typed before is ignored. /deny REASON denies an answer without calls, and /help lists what can be typed.
docs/sessions.md has a session to try, and what it learns.

Without --url it starts a service of its own (python -m launch.serve), and stops it at the end. The model is served
there; its tools run here, in the workspace and nowhere else. If the service needs a key, set the environment variable
SDPO_API_KEY. NO_COLOR=1 leaves out colours; with TERM=dumb whole lines are typed instead of keys.

Commands of the model can change the workspace and nothing else. They have no network but a loopback of their own, can
read only the system and what --readable names, get no variables but those of --env, may add 2 GB to the disk, and take
at most --timeout seconds. Ctrl-C ends a running one, and the model reads that.

--script: one input per line, from a file or, with -, from a pipe: a text, y, a PATTERN, n REASON, e JSON, t TEXT, q, or
a /command. # begins a comment, and a space a text that looks like a decision. The transcript goes to stdout, everything
else to stderr.

--mcp=FILE adds the tools of MCP servers. Those are your own programs: they run as you, outside of the sandbox, and the
session shows and asks about each call of them. /tools lists what they say about themselves. A policy refuses or allows
such calls by their arguments as JSON: allow fs__read_file {"path": "docs/*"}.

All that is shown and decided is stored in ~/.local/state/sdpo_jax/sessions/ID.jsonl (--state, or XDG_STATE_HOME), and
--resume continues from there, even after a crash.

Exit codes: 0 the user left, or a script was run to its end; 1 a script was not, since a request was refused, the
service of --url was lost, or a call is still undecided; 2 bad input, a service that is not there at the start, or one
that was started here and has ended, named in a sentence; 130 ended by Ctrl-C.
"""

from typing import Any

from absl import flags

from sdpo_jax import command, extras


class Optional(flags.Flag):
  """A flag that may be given without a value."""

  def __init__(self, **values: Any):
    super().__init__(flags.ArgumentParser(), flags.ArgumentSerializer(), **values)
    self.boolean = True  # Tells the parser that the flag needs no value.


flags.DEFINE_string('url', None, 'Address of a running service, such as http://127.0.0.1:8420.')
flags.DEFINE_string(
  'config',
  None,
  'Config of the service that is started without --url; configs/session_quickstart.py if unset. Change a setting with '
  '--config.section.name=value.',
)
flags.DEFINE_string('adapter', None, "Name or id of the adapter that learns, created if needed; 'session' if unset.")
flags.DEFINE_string('workspace', None, 'Folder that the tools read and write; the current one if unset.')
flags.DEFINE_string('script', None, 'File with one input per line; - for the standard input.')
flags.DEFINE_string(
  'policy',
  None,
  'File of rules about which calls run without asking, and which never run, one per line (docs/permissions.md) or as '
  'JSON: [{"rule": "allow", "tool": "read", "pattern": "**"}]; ask, the default, asks about all.',
)
flags.DEFINE_string(
  'mcp',
  None,
  'JSON file of MCP servers (stdio) whose tools the model may propose to call, as SERVER__TOOL: {"mcpServers": '
  '{"NAME": {"command": "…", "args": […], "env": {…}}}}, and "timeout", seconds of a call. They run as you, outside '
  'of the sandbox, in the folder of the file; neither it nor their code may be in the workspace.',
)
flags.DEFINE_string('state', None, 'Folder for the histories of sessions.')
flags.DEFINE_string('system', None, 'System message of a new session.')
flags.DEFINE_string(
  'settings', None, 'JSON file with further settings of a new session, such as {"min_sdpo_examples": 4}.'
)
flags.DEFINE_integer(
  'seed', None, 'Makes proposals reproducible: turn n is sampled with seed + n, also after /retry.', lower_bound=0
)
flags.DEFINE_multi_string(
  'readable',
  [],
  'Folder outside of the workspace that commands can read, such as a data set; may be repeated. Commands can also talk '
  'to programs that listen on a socket in it. Whether to name a folder with secrets, such as ~/.ssh, is your choice.',
)
flags.DEFINE_multi_string(
  'env',
  [],
  'Variable of your environment that commands get, or NAME=VALUE; may be repeated. The model can read it. They get no '
  'other variables of yours.',
)
flags.DEFINE_float('timeout', None, 'Seconds that a command may take; 120 if unset.', lower_bound=0.1)
flags.DEFINE_flag(
  Optional(
    name='resume',
    default=None,
    help_string='Continue a session: --resume=ID, or --resume alone for the newest.',
  )
)


def main() -> int:
  """Run the session; return its exit code."""
  extras.check('session')
  from sdpo_jax.terminal import program

  resume = None if flags.FLAGS.resume == 'false' else flags.FLAGS.resume
  session = None if resume == 'true' else resume
  given = {'overrides': command.overrides(), 'resume': resume is not None, 'session': session}
  return program.run(command.from_flags(program.CommandOptions, **given))


if __name__ == '__main__':
  command.run(main)
