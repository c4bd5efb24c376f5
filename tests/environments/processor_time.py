"""A limit on processor time, for what must not hang."""

import contextlib
import signal


@contextlib.contextmanager
def processor_seconds_at_most(seconds):
  """Raise in what takes longer; patterns are interrupted, too."""

  def interrupt(*_):
    raise AssertionError(f'more than {seconds} s of processor time')

  before = signal.signal(signal.SIGVTALRM, interrupt)
  signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)
