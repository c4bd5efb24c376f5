"""Execution of model-written code (`sandbox.Sandbox`): isolated, limited, in a fresh process for every program."""
