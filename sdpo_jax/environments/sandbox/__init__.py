"""A place to run model-written code (`sandbox.Sandbox`): nothing of the machine, limits on everything, a fresh process
for every program.
"""
