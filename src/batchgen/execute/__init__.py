"""Carries a plan out: loading, moving, stages, workers, recovery."""
