"""The command line: each module defines one group of commands. Heavy modules are imported only when a command runs."""
