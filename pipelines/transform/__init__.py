"""What a rule of the definition makes of rows."""
