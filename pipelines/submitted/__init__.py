"""Modules for spark-submit. Keep other modules out: Python searches a script's folder first when it imports a name."""
