"""Reads plans, journals and events; prints and writes what people look at."""
