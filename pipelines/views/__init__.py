"""Views: streams that SQL derives from captured tables."""
