"""Trains a model on batches and writes its weights. Needs the `local` extra.

The trainer is a *front*, which has an event loop and takes batches, and one or more *ranks*: processes
that compute with torch and have no event loop.
"""
