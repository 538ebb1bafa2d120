"""Pipelines over topics: jobs on Spark, decoding of values, declared pipelines.

A separate product on top of the connector: it imports only the public modules of
`metaq.spark`, and needs the extra `metaq[pipeline]`.
"""
