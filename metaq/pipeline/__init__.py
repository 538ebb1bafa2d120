"""Pipelines over topics: jobs on Spark, decoding of values, declared pipelines.

A product of its own on the connector: it imports of `metaq.spark` what users of that
import, and takes the extra `metaq[pipeline]`.
"""
