"""What a person sees of a command while it runs."""

import io

from sdpo_jax.terminal import live_output


def test_the_newest_output_is_shown_and_erased(monkeypatch):
  monkeypatch.setattr(live_output, '_QUIET_S', 0)
  monkeypatch.setattr(live_output, '_REFRESH_S', 0)
  out = io.StringIO()
  with live_output.live_output(out) as show:
    show(b''.join(b'line %d\n' % number for number in range(30)))
    first = out.getvalue()
    show('5 %\r90 %\x1b[2J é'.encode()[:-1])
    show('é'.encode()[-1:])
    last = out.getvalue()[len(first) :]
  assert '│ line 29' in first and '│ line 20' in first and 'line 19' not in first and 'Ctrl-C ends it' in first
  assert '│ 90 %⟨escape⟩[2J é' in last and '5 %' not in last and out.getvalue().endswith('\x1b[2K')


def test_nothing_is_shown_of_a_short_command():
  out = io.StringIO()
  with live_output.live_output(out) as show:
    show(b'done\n')
  assert not out.getvalue()
