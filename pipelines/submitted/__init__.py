"""Scripts that spark-submit runs. They have their own folder, because Python searches the folder of a script first."""
