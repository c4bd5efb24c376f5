"""The SQL of the tables of sessions; `session_tables` reads and writes their rows."""

from __future__ import annotations

NAMES = frozenset({'sessions', 'session_turns', 'session_examples'})
TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
  id TEXT PRIMARY KEY, adapter TEXT NOT NULL, created REAL NOT NULL, token TEXT NOT NULL, revision INTEGER NOT NULL,
  record TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS sessions_of_adapter ON sessions (adapter);
CREATE TABLE IF NOT EXISTS session_turns (
  session TEXT NOT NULL, n INTEGER NOT NULL, adapter TEXT NOT NULL, prompt_tokens BLOB NOT NULL, tokens BLOB NOT NULL,
  log_probs BLOB NOT NULL, kept_tokens BLOB, record TEXT NOT NULL, PRIMARY KEY (session, n));
CREATE INDEX IF NOT EXISTS session_turns_of_adapter ON session_turns (adapter);
CREATE TABLE IF NOT EXISTS session_examples (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL, n INTEGER NOT NULL, kind TEXT NOT NULL, adapter TEXT NOT NULL,
  state TEXT NOT NULL, head INTEGER NOT NULL, versions TEXT NOT NULL, teacher_prompt BLOB NOT NULL,
  record TEXT NOT NULL, UNIQUE (session, n, kind));
CREATE INDEX IF NOT EXISTS session_examples_of_adapter ON session_examples (adapter, state)
"""
