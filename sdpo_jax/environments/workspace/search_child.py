"""Regular expression search in the files of a folder, in a process that can be killed: some never finish.

Reads a JSON request from standard input and writes the answer to standard output. Run by path; standard library and
folder.py only.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
folders = importlib.import_module('folder')


def main() -> None:
  """Answer the request on standard input: {"found", "more"}, or {"wrong"} for an invalid expression."""
  request = json.load(sys.stdin)
  try:
    expression = re.compile(request['pattern'])
    matches = re.compile(request['names']).fullmatch
  except (re.error, RecursionError, OverflowError) as error:
    json.dump({'wrong': str(error)}, sys.stdout)
    return
  folder = folders.Folder(pathlib.Path(request['folder']))
  found: list[str] = []
  try:
    names = list(folder.files(request['path']))
  except folders.PathError:  # It is a file.
    names = [folder.relative(request['path'])]
  for name in filter(matches, names):
    try:
      content = folder.read(name, request['max_file_bytes'])
    except folders.PathError:
      continue  # Too large, or removed meanwhile.
    if b'\0' in content[:8192]:
      continue
    for number, line in enumerate(content.decode(errors='replace').splitlines(), start=1):
      if expression.search(line):
        found.append(f'{name}:{number}:{line[: request["max_line"]]}')
        if len(found) > request['max_matches']:
          json.dump({'found': found[:-1], 'more': True}, sys.stdout)
          return
  json.dump({'found': found, 'more': False}, sys.stdout)


if __name__ == '__main__':
  main()
