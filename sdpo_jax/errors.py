"""The one exception a user is meant to read."""


class UserError(Exception):
  """Something the user can mend: one sentence that names the setting, file or row and the way out.

  Commands print it to stderr without a traceback and exit with code 2.
  """
