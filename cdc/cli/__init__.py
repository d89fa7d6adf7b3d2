"""The command line: each module defines one group of commands.

Modules that are slow to import are imported only when a command runs.
"""
