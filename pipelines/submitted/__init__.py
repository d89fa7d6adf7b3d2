"""What a cluster is given to run; a folder of its own, for Python puts the folder of a script before all others."""
