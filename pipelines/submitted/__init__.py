"""Entry points that spark-submit runs, in a folder of their own: Python searches the folder of a script first."""
