"""How the rules of a sink transform rows: they drop, rename, mask and compute columns, and filter rows."""
