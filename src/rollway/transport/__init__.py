"""Manifests to the trainer and weights back."""
