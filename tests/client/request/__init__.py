"""Tests of workers of queue groups."""
