"""Model importers, the in-graph session engine and the exporter of SavedModels.

Importing this package stays cheap: TensorFlow is loaded by the modules that need it.
"""
