"""The command line: one module per group of commands. A command imports heavy modules when it runs."""
