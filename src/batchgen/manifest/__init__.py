"""Manifest files to jobs."""
