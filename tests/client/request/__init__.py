"""Tests of request and reply."""
